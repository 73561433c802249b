"""Gives a run its id in the trackers, and its name, project and configuration there. The id is in out_dir, in
trackers_RUN.json, where RUN is the first attempt: so every attempt continues the same run.

The trap is a resume with other settings. A run that resumes as it was computes the same losses again, so the
trackers keep what they have. With other settings the losses differ from the checkpoint on, and the trackers
would go on showing the old ones: that is a new run there, which begins with the rows up to the checkpoint.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

from common.durable_file import write_json
from common.json_file import read_json
from training.configuration.keys import GUARDED
from training.process.redaction import redact, redact_all
from training.trackers.tracker import TrackedRun

MAX_BYTES = 10_000
LISTS = ("sources", "files", "timings", "param_groups", "checkpoints_set_aside")  # long: not for a table

log = logging.getLogger("nanomfu")


def tracked_run(record: dict[str, Any], folder: Path, begins: bool = False) -> TrackedRun:
    """The run of a record that is in this folder. begins: it gets a new id."""
    config = record["config"]
    first = record["attempts"][0]["run_name"]
    facts = {name: _shortened(value) for name, value in record["startup_info"].items()}
    return TrackedRun(
        id=_run_id(folder / f"trackers_{first}.json", begins),
        name=redact(str(config.get("wandb_run_name") or first)),
        project=redact(str(config.get("wandb_project") or "nanomfu")),
        folder=folder,
        config=redact_all({**config, "startup_info": facts}),
    )


def _run_id(path: Path, begins: bool) -> str:
    try:
        known = read_json(path, MAX_BYTES).get("id")
    except (OSError, ValueError):  # a new run, or a file that something else has written
        known = None
    if isinstance(known, str) and known.isalnum() and not begins:
        return known
    new = uuid.uuid4().hex[:8]
    try:
        write_json(path, {"id": new})
    except OSError as error:
        log.warning(f"{path} cannot be written: {error}; a resume will be a new run in the trackers")
    return new


def makes_other_rows(history: dict[str, Any] | None, config: dict[str, Any], start: int) -> bool:
    """Whether an attempt from iteration `start` on makes iterations again that the one before has made with
    other settings. `history` is the record of that one."""
    if history is None or not any(row["iter"] >= start for row in history["training_iterations"]):
        return False
    before, now = history.get("config"), redact_all(config)
    return not isinstance(before, dict) or any(before.get(key) != now.get(key) for key in GUARDED)


def _shortened(value: Any) -> Any:
    """The same without long lists."""
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items() if name not in LISTS}
    return value
