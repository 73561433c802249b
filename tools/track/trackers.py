"""Weights & Biases, TensorBoard and trackio. open() says what the tracker has, whatever ended an earlier
process: the last step of which it has all figures, or NOTHING."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTHING = -1  # the last step of a tracker that has none


@dataclass(frozen=True)
class Run:
    """What a tracker must know of a run. All text is without secrets."""

    id: str  # the same in all attempts
    name: str
    project: str
    folder: Path  # of the record
    config: dict[str, Any]  # the settings, and what is constant in a run

    @property
    def unique_name(self) -> str:
        """For trackers that know a run by its name alone."""
        return f"{self.name}-{self.id}"


class WandbTracker:
    """Its steps can only rise, so each is sent once, whole. Its server says what it has. Files that were
    written offline are written anew, so that the newest alone is the whole run."""

    def open(self, run: Run) -> int:
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",  # the log is beside the record
            x_disable_stats=True,  # the record has clocks, power and memory
            x_disable_meta=True,  # the command line and the environment, which may have secrets
            x_disable_machine_info=True,
            x_save_requirements=False,
            save_code=False,
            disable_git=True,
        )
        self.files, self.offline = run.folder / "wandb", wandb.setup().settings.mode in ("offline", "dryrun")
        self.pattern = f"offline-run-*-{run.id}"
        for earlier in self.files.glob(self.pattern) if self.offline else ():
            shutil.rmtree(earlier)
        names: dict[str, Any] = {"project": run.project, "name": run.name, "id": run.id}
        self.run = wandb.init(
            **names, dir=str(run.folder), resume="allow", config=run.config, settings=settings
        )
        where = f"wandb sync {self.files}/{self.pattern}" if self.offline else self.run.url
        print(f"Weights & Biases: {where}", flush=True)
        return NOTHING if self.offline else (self.run.starting_step or 0) + NOTHING

    def send(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step, commit=True)

    def close(self, completed: bool, summary: dict[str, Any]) -> None:
        self.run.summary.update({"summary": summary})
        self.run.finish(exit_code=0 if completed else 1)
        if self.offline and not any(self.files.glob(f"{self.pattern}/*.wandb")):  # it writes elsewhere then
            raise RuntimeError(f"it could not write into {self.files}")


class TensorBoardTracker:
    """Event files in out_dir/tensorboard/. All figures of a step are one record, which a kill leaves whole or
    cuts off; torch's SummaryWriter would write a record for each figure."""

    def open(self, run: Run) -> int:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.folder = run.folder / "tensorboard" / run.unique_name.replace("/", "_")
        last = self._last()
        self.writer = EventFileWriter(str(self.folder))
        return last

    def send(self, step: int, figures: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=figures[name]) for name in figures])
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self.writer.flush()

    def close(self, completed: bool, summary: dict[str, Any]) -> int:
        self.writer.close()
        return self._last()

    def _last(self) -> int:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        files = map(str, self.folder.glob("events.out.tfevents.*"))
        events = (event for file in files for event in EventFileLoader(file).Load())
        return max((event.step for event in events if event.HasField("summary")), default=NOTHING)


class TrackioTracker:
    """A database in ~/.cache/huggingface/trackio, or in the folder that TRACKIO_DIR names."""

    def open(self, run: Run) -> int:
        import trackio

        names = {"project": run.project, "name": run.unique_name}
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self.begin = lambda: trackio.init(**names, **quiet, config=run.config, resume="allow")
        self.run = self.begin()
        return self.run._next_step - 1  # it has no other name for the last step in the database

    def send(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def close(self, completed: bool, summary: dict[str, Any]) -> int:
        self.run.finish()
        again = self.begin()  # it keeps errors of its database to itself, so ask what is there
        again.finish()
        return again._next_step - 1


TRACKERS: dict[str, Any] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
}
