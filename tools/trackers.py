"""Weights & Biases, TensorBoard and trackio. open() says what the tracker has, whatever ended an earlier
process: the last step of which it has all figures, or NOTHING. Files that only this process reads and writes
are written anew by each process, so they are the whole run."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTHING = -1  # the last step of a tracker that has none


@dataclass(frozen=True)
class Run:
    """What a tracker must know of a run. All text is without secrets."""

    id: str  # the same in all attempts
    name: str
    unique_name: str  # for trackers that know a run by its name alone
    project: str
    folder: Path  # of the record
    config: dict[str, Any]  # the settings, and what is constant in a run


class Wandb:
    """Its steps can only rise, so each is sent once, whole. Its server says what it has."""

    def open(self, run: Run) -> int:
        import wandb

        # the record has the log, clocks and memory; the command line and the environment may have secrets
        off: dict[str, Any] = {"console": "off", "disable_git": True, "save_code": False}
        off |= {f"x_disable_{name}": True for name in ("stats", "meta", "machine_info")}
        settings = wandb.Settings(x_save_requirements=False, **off)
        self.offline = wandb.setup().settings.mode in ("offline", "dryrun")
        self.files = (run.folder / "wandb", f"offline-run-*-{run.id}")
        for earlier in self.files[0].glob(self.files[1]) if self.offline else ():
            shutil.rmtree(earlier)
        names: dict[str, Any] = {"project": run.project, "name": run.name, "id": run.id}
        names |= {"dir": str(run.folder), "resume": "allow", "config": run.config}
        self.run = wandb.init(**names, settings=settings)
        return NOTHING if self.offline else (self.run.starting_step or 0) + NOTHING

    def send(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step, commit=True)

    def close(self, record: dict[str, Any]) -> None:
        self.run.summary.update({"summary": record.get("summary") or {}})
        self.run.finish(exit_code=int(record.get("status") != "completed"))
        if self.offline and not any(self.files[0].glob(f"{self.files[1]}/*.wandb")):
            raise RuntimeError(f"it could not write into {self.files[0]}")  # and took another folder


class TensorBoard:
    """Event files in out_dir/tensorboard/."""

    def open(self, run: Run) -> int:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" / run.unique_name.replace("/", "_")
        shutil.rmtree(folder, ignore_errors=True)
        self.writer = SummaryWriter(str(folder))
        return NOTHING

    def send(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()  # which raises what kept it from writing

    def close(self, record: dict[str, Any]) -> None:
        self.writer.close()


class Trackio:
    """A database in ~/.cache/huggingface/trackio, or in the folder that TRACKIO_DIR names."""

    def open(self, run: Run) -> int:
        import trackio

        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        names = {"project": run.project, "name": run.unique_name}
        self.begin = lambda: trackio.init(**names, **quiet, config=run.config, resume="allow")
        self.run = self.begin()
        self.last = self.run._next_step - 1  # it has no other name for the last step in the database
        return self.last

    def send(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)
        self.last = step

    def close(self, record: dict[str, Any]) -> None:
        self.run.finish()
        again = self.begin()  # it keeps errors of its database to itself, so ask what is there
        again.finish()
        if again._next_step <= self.last:
            raise RuntimeError(f"it took figures up to iteration {self.last}, but has {again._next_step - 1}")


TRACKERS: dict[str, Any] = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}
