"""Sends figures to Weights & Biases. With WANDB_MODE=offline they go to files in out_dir/wandb/, and
`wandb sync` sends those."""

from __future__ import annotations

import logging
from typing import Any

from training.trackers.tracker import NOTHING, TrackedRun
from training.trackers.wandb_files import last_step

log = logging.getLogger("nanomfu")

INIT_TIMEOUT_S = 60.0
FLUSH_S = 1.0  # between writes of the file; by default 15, which a kill would lose


class WandbTracker:
    """Steps at Weights & Biases can only rise, so each is sent once, whole. The server says which step it
    has, or offline the files."""

    def open(self, run: TrackedRun) -> int:
        import wandb  # optional; the rules have checked that it is there

        files = run.own_folder("wandb")
        mode = wandb.setup().settings.mode
        if mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False):
            raise RuntimeError("no API key: run `wandb login`, or set WANDB_MODE=offline")
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            silent=True,  # it would print charts; the log has the address
            console="off",  # the log is beside the record
            x_disable_stats=True,  # the record has clocks, power and memory
            x_disable_meta=True,  # the command line and the environment, which may have secrets
            x_disable_machine_info=True,
            x_save_requirements=False,
            save_code=False,
            disable_git=True,
            x_transaction_log_flush_interval=FLUSH_S,
        )
        self.run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            config=run.config,
            dir=str(run.folder),
            settings=settings,
        )
        self.run.define_metric("*", step_metric="iter")
        offline = mode in ("offline", "dryrun")
        where = f"wandb sync {files}/offline-run-*-{run.id}  # sends it" if offline else self.run.url
        log.info(f"Weights & Biases: {where}")
        if offline:
            return last_step(files, run.id)
        return (self.run.starting_step or 0) + NOTHING

    def send(self, step: int, figures: dict[str, float], texts: dict[str, str]) -> None:
        self.run.log({"iter": step, **figures, **texts}, step=step, commit=True)

    def close(self, completed: bool, summary: dict[str, Any]) -> None:
        self.run.summary.update(_flat(summary))
        self.run.finish(exit_code=0 if completed else 1)


def _flat(values: dict[str, Any], prefix: str = "summary/") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
