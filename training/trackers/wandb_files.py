"""Reads which steps the offline files of Weights & Biases have. After a kill, only the files know.

A file is a log as LevelDB writes it, behind 7 bytes of its own: blocks of 32 KiB with parts of records. Each
part has a checksum (4 bytes), its length (2) and its kind (1): whole, first, middle or last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from common.json_file import read_regular
from training.trackers.tracker import NOTHING

MAGIC, START = b":W&B", 7
BLOCK = 1 << 15
PART = struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4
MAX_BYTES = 1 << 32


def last_step(folder: Path, run_id: str) -> int:
    """The last step that offline runs of this id have; NOTHING if there is none."""
    steps = [NOTHING]
    for path in folder.glob(f"offline-run-*/run-{run_id}.wandb"):
        steps += (step for step, _ in history(path))
    return max(steps)


def history(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(step, {name: value as JSON}) of each row that the file has. Raises OSError or ValueError."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in records(read_regular(path, MAX_BYTES)):
        record = Record.FromString(content)
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            yield record.history.step.num, row


def records(content: bytes) -> Iterator[bytes]:
    """Ends where a record is cut off."""
    if content and not content.startswith(MAGIC):
        raise ValueError("it is no file of Weights & Biases that this version can read")
    at, begun = START, b""
    while at + PART.size <= len(content):
        if (left := BLOCK - at % BLOCK) < PART.size:  # too short for a part: empty
            at += left
            continue
        _, length, kind = PART.unpack_from(content, at)
        part = content[at + PART.size : at + PART.size + length]
        if not kind or len(part) < length:
            return
        at += PART.size + length
        begun = part if kind in (WHOLE, FIRST) else begun + part
        if kind in (WHOLE, LAST):
            yield begun
