"""Weights & Biases, TensorBoard and trackio. Each says itself what it has: whatever ended an earlier process,
open() returns the last step of which the tracker has all figures, or NOTHING."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.durable_file import create
from common.json_file import read_regular

NOTHING = -1  # the last step of a tracker that has none
FLUSH_S = 1.0  # between writes of Weights & Biases' file; by default 15, which a kill would lose


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

    def own_folder(self, name: str) -> Path:
        """A folder beside the record. Raises ValueError if it is a link: nothing is written through one."""
        folder = self.folder / name
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link; move it away")
        return folder


class WandbTracker:
    """Its steps can only rise, so each is sent once, whole."""

    def open(self, run: Run) -> int:
        import wandb

        mode = wandb.setup().settings.mode
        self.offline = mode in ("offline", "dryrun")
        if not self.offline and mode != "disabled" and not wandb.login(prompt=False):
            raise RuntimeError("no API key: run `wandb login`, or set WANDB_MODE=offline")
        settings = wandb.Settings(
            init_timeout=60.0,
            silent=True,
            console="off",  # the log is beside the record
            x_disable_stats=True,  # the record has clocks, power and memory
            x_disable_meta=True,  # the command line and the environment, which may have secrets
            x_disable_machine_info=True,
            x_save_requirements=False,
            save_code=False,
            disable_git=True,
            x_transaction_log_flush_interval=FLUSH_S,
        )
        files = run.own_folder("wandb")
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
        where = f"wandb sync {files}/offline-run-*-{run.id}" if self.offline else self.run.url
        print(f"Weights & Biases: {where}", flush=True)
        self.files = lambda: files.glob(f"offline-run-*/run-{run.id}.wandb")
        return self._last() if self.offline else (self.run.starting_step or 0) + NOTHING

    def send(self, step: int, figures: dict[str, float], texts: dict[str, str]) -> None:
        self.run.log({"iter": step, **figures, **texts}, step=step, commit=True)

    def close(self, completed: bool, summary: dict[str, Any]) -> int | None:
        self.run.summary.update(_flat(summary))
        self.run.finish(exit_code=0 if completed else 1)
        return self._last() if self.offline else None

    def _last(self) -> int:
        return max((step for path in self.files() for step, _ in wandb_history(path)), default=NOTHING)


def _flat(values: dict[str, Any], prefix: str = "summary/") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def wandb_history(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(step, {name: value as JSON}) of each row in an offline file, up to where it is cut off. The file is a
    log as LevelDB writes it, behind 7 bytes of its own: blocks of 32 KiB with parts of records. A part has a
    checksum (4 bytes), its length (2) and its kind (1): 1 whole, 2 first, 3 middle, 4 last."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, begun = read_regular(path, 1 << 32), 7, b""
    if content and not content.startswith(b":W&B"):
        raise ValueError(f"{path} is no file of Weights & Biases that this version can read")
    while at + 7 <= len(content):
        if (left := (1 << 15) - at % (1 << 15)) < 7:  # of the block: too short for a part
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        part = content[at + 7 : at + 7 + length]
        if not kind or len(part) < length:
            return
        at, begun = at + 7 + length, part if kind in (1, 2) else begun + part
        if kind in (1, 4) and (record := Record.FromString(begun)).HasField("history"):
            items = record.history.item
            yield record.history.step.num, {i.key or "/".join(i.nested_key): i.value_json for i in items}


class TensorBoardTracker:
    """Event files in out_dir/tensorboard/. All figures of a step are one record, which a kill leaves whole or
    cuts off; torch's SummaryWriter would write a record for each figure."""

    def open(self, run: Run) -> int:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder = run.own_folder("tensorboard") / run.unique_name.replace("/", "_")
        self.folder.mkdir(parents=True, exist_ok=True)
        last = self._last()
        # readers take the files in the order of their names
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
        self.file = create(self.folder / name)
        self.writer = RecordWriter(self.file)
        self.texts = {"config": _preformatted(run.config)}  # for the first step
        self._write(file_version="brain.Event:2")
        return last

    def send(self, step: int, figures: dict[str, float], texts: dict[str, str]) -> None:
        self._write(step=step, summary=_summary(figures, {**self.texts, **texts}))
        self.texts = {}

    def close(self, completed: bool, summary: dict[str, Any]) -> int:
        if (last := self._last()) > NOTHING:
            content = _preformatted({"completed": completed, **summary})
            self._write(step=last, summary=_summary({}, {"summary": content}))
        self.file.close()
        return last

    def _last(self) -> int:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        files = map(str, self.folder.glob("events.out.tfevents.*"))
        events = (event for file in files for event in EventFileLoader(file).Load())
        return max((event.step for event in events if event.HasField("summary")), default=NOTHING)

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.file.flush()


def _summary(figures: dict[str, float], texts: dict[str, str]) -> Any:
    """The Summary of one step."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    for name, text in texts.items():
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        values.append(Summary.Value(tag=f"{name}/text_summary", metadata=kind, tensor=tensor))
    return Summary(value=values)


def _preformatted(content: dict[str, Any]) -> str:
    """JSON that TensorBoard, which shows Markdown, shows as it is."""
    return "\n".join(f"    {line}" for line in json.dumps(content, indent=1, default=str).splitlines())


class TrackioTracker:
    """A database in ~/.cache/huggingface/trackio, or in the folder that TRACKIO_DIR names."""

    def open(self, run: Run) -> int:
        import trackio

        names = {"project": run.project, "name": run.unique_name}
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self.begin = lambda: trackio.init(**names, **quiet, config=run.config, resume="allow")
        self.run = self.begin()
        return self.run._next_step - 1  # it has no other name for the last step in the database

    def send(self, step: int, figures: dict[str, float], texts: dict[str, str]) -> None:
        self.run.log({**figures, **texts}, step=step)

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
