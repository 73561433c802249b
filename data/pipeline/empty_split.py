"""A split to which no document fell gets the last one, or the end of an only one.

With few documents the coin of units.py may put all of them into one split, and a run needs both. Then the
last document moves; an only one is cut in two. Only token files of the unit that holds it change. A kill in
the middle leaves that unit without a valid record, and it is made again.
"""

import os
from pathlib import Path

import numpy as np

from data.pipeline.token_files import SPLITS, TokenWriter, smallest_dtype, sync
from data.pipeline.units import Settings, ShardWriter, Unit, write_json

CHUNK = 1 << 24  # tokens read at once


def fill_empty_split(
    units: list[Unit], records: list[dict], folder: Path, settings: Settings, vocab_size: int
) -> list[dict]:
    """The records, changed where tokens moved."""
    records = list(records)
    documents = sum(record["documents"] for record in records)
    if any(unit.split for unit in units) or sum(_tokens(record) for record in records) < 2:
        return records
    while empty := [split for split in SPLITS if not any(_names(record, split) for record in records)]:
        target, source = empty[0], SPLITS[1 - SPLITS.index(empty[0])]
        last = max(i for i, record in enumerate(records) if _names(record, source))
        if documents > 1:
            cut = _last_document(records[last], source, folder, settings, vocab_size)
        elif target == "val":
            tokens = _tokens(records[last])
            cut = min(max(1, int(tokens * (1 - settings.val_fraction))), tokens - 1)
        else:
            cut = 0  # to train as a whole; the next turn cuts it
        records[last] = _move(units[last], records[last], source, target, cut, folder, settings, vocab_size)
    return records


def _names(record: dict, split: str) -> list[str]:
    return sorted(name for name in record["files"] if name.startswith(f"{split}_"))


def _tokens(record: dict) -> int:
    return sum(file["tokens"] for file in record["files"].values())


def _read(path: Path, vocab_size: int) -> np.ndarray:
    return np.memmap(path, dtype=np.dtype(smallest_dtype(vocab_size)).newbyteorder("<"), mode="r")


def _last_document(record: dict, split: str, folder: Path, settings: Settings, vocab_size: int) -> int:
    """Where it begins, in the split's tokens of this unit: after the end-of-text id before its own."""
    end = sum(record["files"][name]["tokens"] for name in _names(record, split))
    own = True
    for name in reversed(_names(record, split)):
        ids = _read(folder / name, vocab_size)
        start = end - len(ids)
        for stop in range(len(ids), 0, -CHUNK):
            first = max(0, stop - CHUNK)
            found = np.flatnonzero(ids[first:stop] == settings.eot_id)
            if own and len(found):
                found, own = found[:-1], False
            if len(found):
                return start + first + int(found[-1]) + 1
        end = start
    return 0


def _move(
    unit: Unit,
    record: dict,
    source: str,
    target: str,
    cut: int,
    folder: Path,
    settings: Settings,
    vocab_size: int,
) -> dict:
    """Give the source's tokens from `cut` on to the target, which has none; the unit's new record."""
    kept, gone, start = {}, [], 0
    writer = ShardWriter(folder, target, unit.number, settings.shard_tokens, vocab_size)
    for name in _names(record, source):
        ids = _read(folder / name, vocab_size)
        head = min(max(0, cut - start), len(ids))
        start += len(ids)
        for first in range(head, len(ids), CHUNK):
            writer.write(ids[first : first + CHUNK])
        if head == len(ids):
            kept[name] = record["files"][name]
        elif head == 0:
            gone.append(name)
        else:
            shorter = TokenWriter(folder / f"{name}.tmp", smallest_dtype(vocab_size), vocab_size)
            for first in range(0, head, CHUNK):
                shorter.write(ids[first : min(head, first + CHUNK)])
            kept[name] = shorter.finish()
    files = kept | writer.finish()
    temporary = [name for name in files if (folder / f"{name}.tmp").is_file()]
    for name in temporary:
        sync(folder / f"{name}.tmp")
    for name in temporary:
        os.replace(folder / f"{name}.tmp", folder / name)
    for name in gone:
        (folder / name).unlink()
    record = record | {"files": files}
    write_json(unit.record_path(folder), record)
    return record
