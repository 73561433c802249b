"""Cuts an only document in two, as a run needs both splits: its end is for validation.

The same is done if --max_tokens ends before the first document for validation; data/pipeline/splits.py sees
to it that there is one. Only the token files of the last unit change. If the process is killed meanwhile,
that unit is left without a valid manifest, and it is made again.
"""

import math
from pathlib import Path

import numpy as np

from common.durable_file import write_json
from data.pipeline.token_files import SPLITS, smallest_dtype, stored_dtype
from data.pipeline.token_writer import ShardWriter
from data.pipeline.units import Settings, Unit, give_names

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
    names, start = _names(manifest, source), 0
    shards = (unit.number, settings.shard_tokens, vocab_size)
    kept, moved = ShardWriter(folder, source, *shards), ShardWriter(folder, target, *shards)
    for name in names:
        ids = np.memmap(folder / name, dtype=stored_dtype(smallest_dtype(vocab_size)), mode="r")
        for first in range(0, len(ids), CHUNK):
            part = ids[first : first + CHUNK]
            head = max(0, cut - start)
            kept.write(part[:head])
            moved.write(part[head:])
            start += len(part)
    files = kept.finish() | moved.finish()
    give_names(folder, list(files))
    for name in set(names) - files.keys():
        (folder / name).unlink()
    # where tokens moved, no document as a whole is for validation
    manifest = manifest | {"files": files, "val_files": [], "val_documents": 0}
    write_json(unit.manifest_path(folder), manifest)
    return manifest
