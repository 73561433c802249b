"""Checks a stored packing: index.json, which describes it, and the hashes of windows.bin and pieces.bin.

The trap: a packing that was cut or damaged still gives windows, of other tokens than before. So sizes and
hashes of its files are recorded, as those of token files are, and a resume compares its hash.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from common.durable_file import sync, write_json
from common.json_file import open_regular, read_json
from training.batches.token_files import TokenFiles

INDEX_BYTES = 1 << 28  # no index.json is larger: it has about a hundred bytes for each token file
COUNTS = ("windows", "documents", "tokens_kept", "tokens_cut_off")
READ_BYTES = 1 << 24


class DamagedIndex(ValueError):
    """The message says in which way."""


def write_index(folder: Path, stamp: list, description: dict) -> None:
    """Writes index.json beside the finished windows.bin and pieces.bin. Returns when all is on disk."""
    names = _sizes(description)
    files = {name: {"bytes": size, "sha256": _hash(folder / name)} for name, size in names.items()}
    for name in names:
        sync(folder / name)
    write_json(folder / "index.json", {"stamp": stamp, **description, "files": files})


def read_index(folder: Path, tokens: TokenFiles, block_size: int, stamp: list, hashes: bool) -> dict | None:
    """index.json's content without the stamp; None if there is none for tokens with this stamp. Raises
    DamagedIndex. hashes: reads windows.bin and pieces.bin, too."""
    path = folder / "index.json"
    if not os.path.lexists(path):
        return None
    try:
        index = read_json(path, INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise DamagedIndex(f"index.json: {error}") from None
    if index.get("stamp") != stamp:
        return None
    _check_counts(index, tokens.total, block_size)
    files = index.get("files")
    if not isinstance(files, dict):
        raise DamagedIndex("index.json records no hashes")
    for name, size in _sizes(index).items():
        recorded = files.get(name)
        if not isinstance(recorded, dict) or not re.fullmatch("[0-9a-f]{64}", str(recorded.get("sha256"))):
            raise DamagedIndex(f"index.json records no hash of {name}")
        found = _size(folder / name)
        if found != size:
            raise DamagedIndex(f"{name} has {found:,} bytes instead of {size:,}")
        if hashes and _hash(folder / name) != recorded["sha256"]:
            raise DamagedIndex(f"{name} has another hash")
    return {key: index[key] for key in (*COUNTS, "share_padded", "files")}


def index_hash(index: dict) -> str:
    """One hash of which documents share a window. index: what read_index() returned."""
    hashes = [index["files"][name]["sha256"] for name in sorted(_sizes(index))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _sizes(description: dict) -> dict[str, int]:
    """Bytes of each file: (windows + 1,) and (documents, 2) numbers of 8 bytes."""
    return {"windows.bin": 8 * (description["windows"] + 1), "pieces.bin": 16 * description["documents"]}


def _check_counts(index: dict, total: int, block_size: int) -> None:
    for name in COUNTS:
        value = index.get(name)
        if type(value) is not int or not (0 if name == "tokens_cut_off" else 1) <= value <= total:
            raise DamagedIndex(f"index.json records {name} as {value!r:.40}")
    places = index["windows"] * (block_size + 1)
    consistent = (
        index["tokens_kept"] + index["tokens_cut_off"] == total
        and index["windows"] <= index["documents"] <= index["tokens_kept"] <= places
        and index.get("share_padded") == 1 - index["tokens_kept"] / places
    )
    if not consistent:
        raise DamagedIndex("the counts in index.json contradict each other")


def _size(path: Path) -> int:
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        raise DamagedIndex(f"{path.name}: {error}") from None


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
