"""Writes the event files of TensorBoard, in out_dir/tensorboard/."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from common.durable_file import create
from training.trackers.tracker import NOTHING, TrackedRun

HEADER, FOOTER = struct.Struct("<QI"), 4  # of a record in an event file: length and checksum; checksum
RECORD_MAX = 1 << 24  # bytes; one of ours has some hundred


class TensorBoardTracker:
    """Writes one record a step, with all its figures, at once. So after a kill, a step is in the file or not,
    and the last whole record says where to go on.

    torch's SummaryWriter would write a record for each figure, in a thread that prints a traceback when the
    disk is full.
    """

    def open(self, run: TrackedRun) -> int:
        from tensorboard.summary.writer.record_writer import RecordWriter  # the rules have checked it

        folder = run.own_folder("tensorboard") / run.unique_name.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        last = max(map(_last_step, folder.glob("events.out.tfevents.*")), default=NOTHING)
        # readers take the files in the order of their names
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{socket.gethostname()}.{os.getpid()}"
        self.file = create(folder / name)
        self.writer = RecordWriter(self.file)
        self.step, self.texts = NOTHING, {"config": _preformatted(run.config)}  # for the first step
        self._write(file_version="brain.Event:2")
        return last

    def send(self, step: int, figures: dict[str, float], texts: dict[str, str]) -> None:
        self._write(step=step, summary=_summary(figures, {**self.texts, **texts}))
        self.step, self.texts = step, {}

    def close(self, completed: bool, summary: dict[str, Any]) -> None:
        if self.step > NOTHING:
            content = _preformatted({"completed": completed, **summary})
            self._write(step=self.step, summary=_summary({}, {"summary": content}))
        self.file.close()

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self.file.flush()


def _summary(figures: dict[str, float], texts: dict[str, str]) -> Any:
    """The Summary of one step."""
    from torch.utils.tensorboard.summary import scalar, text

    parts = [scalar(name, value) for name, value in figures.items()]
    parts += [text(name, content) for name, content in texts.items()]
    for part in parts[1:]:
        parts[0].value.extend(part.value)
    return parts[0]


def _preformatted(content: dict[str, Any]) -> str:
    """JSON that TensorBoard, which shows Markdown, shows as it is."""
    return "\n".join(f"    {line}" for line in json.dumps(content, indent=1, default=str).splitlines())


def _last_step(path: Path) -> int:
    """The step of the last whole record in an event file. Only lengths are read up to there."""
    from tensorboard.compat.proto.event_pb2 import Event

    newest = b""
    with open(path, "rb") as file:
        size = path.stat().st_size
        while len(header := file.read(HEADER.size)) == HEADER.size:
            length, _ = HEADER.unpack(header)
            end = file.tell() + length + FOOTER
            if length > RECORD_MAX or end > size:  # cut off by a kill or a full disk
                break
            newest = file.read(length)
            file.seek(end)
    event = Event.FromString(newest)
    return event.step if event.HasField("summary") else NOTHING  # the first record has the format alone
