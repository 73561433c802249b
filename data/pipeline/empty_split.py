"""Cuts an only document in two, as a run needs both splits: its end is for validation.

The same is done if --max_tokens ends before the first document for validation; data/pipeline/splits.py sees
to it that there is one. Only the token files of the last unit change. If the process is killed meanwhile,
that unit is left without a valid manifest, and it is made again.
"""

import math
import os
from pathlib import Path

import numpy as np

from common.durable_file import sync, sync_folder, write_json
from data.pipeline.token_files import SPLITS, ShardWriter, TokenWriter, smallest_dtype, stored_dtype
from data.pipeline.units import Settings, Unit

CHUNK = 1 << 24  # tokens that are read at once


def fill_empty_split(
    units: list[Unit], manifests: list[dict], folder: Path, settings: Settings, vocab_size: int
) -> list[dict]:
    """The units' manifests, changed where tokens moved."""
    manifests = list(manifests)
    total = sum(map(_tokens, manifests))
    if any(unit.split for unit in units) or total < 2:
        return manifests
    while empty := [split for split in SPLITS if not any(_names(m, split) for m in manifests)]:
        target, source = empty[0], SPLITS[1 - SPLITS.index(empty[0])]
        last = max(i for i, manifest in enumerate(manifests) if _names(manifest, source))
        cut = 0  # all of it moves to train; then val may be empty, and the next turn cuts the tokens
        if target == "val":
            tokens = _tokens(manifests[last])
            cut = min(max(1, tokens - math.ceil(total * settings.val_fraction)), tokens - 1)
            print("no document is for validation; the end of the last one is taken for it")
        manifests[last] = _move(
            units[last], manifests[last], source, target, cut, folder, settings, vocab_size
        )
    return manifests


def _names(manifest: dict, split: str) -> list[str]:
    return sorted(name for name in manifest["files"] if name.startswith(f"{split}_"))


def _tokens(manifest: dict) -> int:
    return sum(file["tokens"] for file in manifest["files"].values())


def _read(path: Path, vocab_size: int) -> np.ndarray:
    return np.memmap(path, dtype=stored_dtype(smallest_dtype(vocab_size)), mode="r")


def _move(
    unit: Unit,
    manifest: dict,
    source: str,
    target: str,
    cut: int,
    folder: Path,
    settings: Settings,
    vocab_size: int,
) -> dict:
    """Move the source's tokens from `cut` on to the target, which has none. Returns the new manifest."""
    kept, moved, start = {}, [], 0
    writer = ShardWriter(folder, target, unit.number, settings.shard_tokens, vocab_size)
    for name in _names(manifest, source):
        ids = _read(folder / name, vocab_size)
        head = min(max(0, cut - start), len(ids))
        start += len(ids)
        for first in range(head, len(ids), CHUNK):
            writer.write(ids[first : first + CHUNK])
        if head == len(ids):
            kept[name] = manifest["files"][name]
        elif head == 0:
            moved.append(name)
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
    sync_folder(folder)
    for name in moved:
        (folder / name).unlink()
    manifest = manifest | {"files": files}
    write_json(unit.manifest_path(folder), manifest)
    return manifest
