"""Checks a stored packing: index.json, which describes it, and the hash of windows.bin and pieces.bin.

The trap: a packing that was cut or damaged still gives windows, of other tokens than before. So the sizes of
its files follow from its counts, their hash is recorded, and a resume compares it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.durable_file import sync, write_json
from common.json_file import open_regular
from common.schema import Count, Sha256, naming, read

INDEX_BYTES = 1 << 28  # no index.json is larger: it has about a hundred bytes for each token file
READ_BYTES = 1 << 24


@dataclass(frozen=True)
class PackedIndex:
    stamp: list[Any]  # of the token files
    windows: Count
    documents: Count
    tokens_kept: Count
    tokens_cut_off: Count
    share_padded: float
    sha256: Sha256


def write_index(folder: Path, stamp: list, description: dict) -> None:
    """Writes index.json beside the finished windows.bin and pieces.bin. Returns when all is on disk."""
    for name in _sizes(description):
        sync(folder / name)
    write_json(folder / "index.json", {"stamp": stamp, **description, "sha256": _hash(folder, description)})


def read_index(folder: Path, stamp: list, hashes: bool) -> dict | None:
    """index.json's content without the stamp; None if there is none for tokens with this stamp. Raises
    UserError. hashes: reads windows.bin and pieces.bin, too. What they say is checked where it is used."""
    path = folder / "index.json"
    if not os.path.lexists(path):
        return None
    index = asdict(read(PackedIndex, path, INDEX_BYTES))
    if index.pop("stamp") != stamp:
        return None
    with naming(path):
        for name, size in _sizes(index).items():
            with open_regular(folder / name) as file:
                found = os.fstat(file.fileno()).st_size
            if found != size:
                raise ValueError(f"{name} has {found:,} bytes instead of {size:,}")
        if hashes and _hash(folder, index) != index["sha256"]:
            raise ValueError("windows.bin and pieces.bin have another hash")
    return index


def _sizes(description: dict) -> dict[str, int]:
    """Bytes of each file: (windows + 1,) and (documents, 2) numbers of 8 bytes."""
    return {"windows.bin": 8 * (description["windows"] + 1), "pieces.bin": 16 * description["documents"]}


def _hash(folder: Path, description: dict) -> str:
    """One hash of which documents share a window; checkpoints have it."""
    hashes = []
    for name in sorted(_sizes(description)):
        digest = hashlib.sha256()
        with open_regular(folder / name) as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
        hashes.append(digest.hexdigest())
    return hashlib.sha256("".join(hashes).encode()).hexdigest()
