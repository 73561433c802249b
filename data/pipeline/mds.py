"""Reads MosaicML's MDS shards: folders of an index.json and shards, as the mosaicml-streaming package writes.

    index.json  of each shard: its columns, with encodings and fixed sizes; file names, bytes, hashes; samples
    shard       uint32 samples · uint32 offset of each sample and of the end · JSON of the columns · samples
    sample      uint32 size of each column that has no fixed size · the values of the columns

The layout is that of version 0.13 of the package (streaming/base/format/mds); the package itself is not
needed. The trap: every count, size and offset comes from a file that may be damaged or hostile, so each is
compared with the bytes that are there before it is used. Nothing is ever unpickled.
"""

import functools
import hashlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.json_file import open_regular, read_json
from common.text import shown
from data.folders import is_plain_name
from data.pipeline.decompression import CODECS, is_disk_error, open_decompressed
from data.pipeline.token_files import is_count

INDEX = "index.json"
INDEX_BYTES = 1 << 28  # of an index.json: it has about 700 bytes for each shard
MOST_BYTES = 2**32 - 1  # of a shard: its offsets have four bytes
MOST_COLUMNS = 10_000
XXHASH = re.compile("xxh(32|64|128|3_64|3_128)")
FOLDERS_UP = 4  # an index of several writers names its shards by folder: '00000/shard.00000.mds'


@dataclass(frozen=True)
class FileInfo:
    """What index.json says of a file."""

    name: str  # relative to the folder of index.json
    size: int  # bytes
    hashes: dict[str, str]


@dataclass(frozen=True)
class Shard:
    """What index.json says of a shard."""

    columns: dict[str, tuple[str, int | None]]  # name -> (encoding, size if it is fixed), in their order
    compression: str | None
    raw: FileInfo
    compressed: FileInfo | None
    samples: int


def is_shard(path: Path) -> bool:
    return re.search(r"\.mds(\.\w+)?$", path.name) is not None


# --- index.json ---


def _field(entry: Any, name: str, kind: type, most: int = MOST_BYTES) -> Any:
    """A field of an object in index.json, whose type is certain then, and that no number is too large."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if type(value) is not kind or kind is int and not is_count(value, most):
        raise ValueError(f"{name} is {value!r:.80} in {entry!r:.80}")
    return value


@functools.lru_cache(8)
def read_index(path: Path) -> list[Shard]:
    """Raises UserError for anything that is not an index of MDS shards."""
    try:
        index = read_json(path, INDEX_BYTES)
        if index.get("version") != 2:
            raise ValueError(f"it has version {index.get('version')!r:.40}, and version 2 is read")
        if not _field(index, "shards", list):
            raise ValueError("it names no shards")
        return [_read_shard(shard) for shard in index["shards"]]
    except FileNotFoundError:
        raise UserError(
            f"there is no {path}; name the folder that MDSWriter wrote, with its index.json"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not an index of MDS shards: {error}") from None


def _read_shard(entry: Any) -> Shard:
    if _field(entry, "format", str) != "mds" or entry.get("version") != 2:
        raise ValueError(f"a shard has format {entry['format']!r:.40}, and 'mds' of version 2 is read")
    names, encodings, sizes = (
        _field(entry, f"column_{what}", list) for what in ("names", "encodings", "sizes")
    )
    if not len(names) == len(encodings) == len(sizes) <= MOST_COLUMNS:
        raise ValueError(f"the columns are {names!r:.80}, their encodings {encodings!r:.80}")
    columns = {}
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        if not (isinstance(name, str) and isinstance(encoding, str)) or name in columns:
            raise ValueError(f"a column is {name!r:.80} with the encoding {encoding!r:.80}")
        if size is not None and not is_count(size, MOST_BYTES):
            raise ValueError(f"the column {name!r:.80} has the size {size!r:.80}")
        columns[name] = (encoding, size or None)
    compression = None if entry.get("compression") is None else _field(entry, "compression", str)
    compressed = None if entry.get("zip_data") is None else _read_file(entry["zip_data"])
    samples = _field(entry, "samples", int, MOST_BYTES // 4)
    return Shard(columns, compression, _read_file(entry.get("raw_data")), compressed, samples)


def _read_file(info: Any) -> FileInfo:
    name, size = _field(info, "basename", str), _field(info, "bytes", int)
    if not all(map(is_plain_name, name.split("/"))):
        raise ValueError(f"the file name {name!r:.80} leads out of the folder")
    hashes = _field(info, "hashes", dict) if info.get("hashes") else {}
    for kind in hashes:
        _digest(kind, b"")
        _field(hashes, kind, str)
    return FileInfo(name, size, hashes)


def _digest(kind: str, content: bytes) -> str:
    """The hash of this kind. Those of xxhash are in a library, others in Python itself."""
    if XXHASH.fullmatch(kind):
        if importlib.util.find_spec("xxhash") is None:
            raise ValueError(f"its hashes are of the kind {kind}, which needs the xxhash library")
        return getattr(importlib.import_module("xxhash"), kind)(content).hexdigest()
    if kind not in hashlib.algorithms_guaranteed or kind.startswith("shake"):
        raise ValueError(f"its hashes are of the kind {kind!r:.40}, which is not known")
    return hashlib.new(kind, content, usedforsecurity=False).hexdigest()


# --- the shards of a folder ---


def find_shards(folders: list[str], columns: Mapping[str, Callable[[str], str | None]]) -> list[Path]:
    """The files of all shards, in their order. columns: {name: what is wrong with an encoding, or None}.
    Raises UserError for a missing shard, one of another size, and a column that is missing or unreadable."""
    files = []
    for folder in dict.fromkeys(folders):
        for shard in read_index(Path(folder) / INDEX):
            info = shard.raw
            if shard.compressed and not (Path(folder) / info.name).is_file():
                info = shard.compressed
            path = Path(folder) / info.name
            if not path.is_file():
                raise UserError(f"{path} is missing: the folder was not copied whole")
            if path.stat().st_size != info.size:
                raise _damaged(path, f"it has {path.stat().st_size:,} bytes, {INDEX} says {info.size:,}")
            if info is not shard.raw and _codec(shard) not in CODECS:
                raise UserError(
                    f"{path} is compressed by {shown(shard.compression)}; decompress the shards, or write "
                    f"them with one of {', '.join(CODECS)}"
                )
            for column, wrong in columns.items():
                if column not in shard.columns:
                    raise UserError(f"{path} has no column {column!r}; it has {', '.join(shard.columns)}")
                if problem := wrong(shard.columns[column][0]):
                    raise UserError(f"the column {column!r} of {path} {problem}")
            files.append(path)
    return files


def _shard_of(path: Path) -> tuple[Shard, FileInfo]:
    """What the nearest index.json that names this file says of it."""
    for folder in list(path.parents)[: FOLDERS_UP + 1]:
        if (folder / INDEX).is_file():
            name = path.relative_to(folder).as_posix()
            for shard in read_index(folder / INDEX):
                for info in (shard.raw, shard.compressed):
                    if info is not None and info.name == name:
                        return shard, info
    raise UserError(f"no {INDEX} beside {path} names it")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged: {why}; copy it anew")


# --- one shard ---


def read_samples(path: Path, columns: list[str]) -> Iterator[list[tuple[str, memoryview]]]:
    """Of each sample, (encoding, bytes) of these columns. The whole shard is in memory. Raises UserError;
    if hash or size are wrong, before the first sample."""
    shard, info = _shard_of(path)
    raw = memoryview(_read_raw(path, shard, info))
    offsets = _offsets(path, raw, shard)
    for number in range(shard.samples):
        values = _split_sample(path, number, raw[offsets[number] : offsets[number + 1]], shard)
        yield [(shard.columns[column][0], values[column]) for column in columns]


def _codec(shard: Shard) -> str:
    """The name in 'zstd:3', which also has a level."""
    return (shard.compression or "").partition(":")[0]


def _read_raw(path: Path, shard: Shard, info: FileInfo) -> bytes:
    """The shard, decompressed. Sizes and hashes are those that index.json says."""
    try:
        with open_regular(path) as file:
            content = file.read(info.size + 1)
        _compare(content, info)
        if info is not shard.raw:
            with open_decompressed(io.BytesIO(content), _codec(shard)) as file:
                content = file.read(shard.raw.size + 1)  # no more, whatever the content claims
            _compare(content, shard.raw)
        return content
    except (UserError, MemoryError):
        raise
    except Exception as error:  # each codec raises errors of its own
        if is_disk_error(error):
            raise
        raise _damaged(path, f"{error}") from None


def _compare(content: bytes, info: FileInfo) -> None:
    if len(content) != info.size:
        found = f"{len(content):,}" if len(content) < info.size else f"more than {info.size:,}"
        raise ValueError(f"{info.name} has {found} bytes, {INDEX} says {info.size:,}")
    for kind, recorded in info.hashes.items():
        if (found := _digest(kind, content)) != recorded:
            raise ValueError(f"the {kind} of {info.name} is {found}, {INDEX} says {shown(recorded)}")


def _offsets(path: Path, raw: memoryview, shard: Shard) -> list[int]:
    """Where each sample begins, and where the last one ends."""
    count = int(np.frombuffer(raw[:4], "<u4")[0]) if len(raw) >= 4 else 0
    begin = 4 + 4 * (count + 1)
    if count != shard.samples:
        raise _damaged(path, f"it says that it has {count:,} samples, {INDEX} says {shard.samples:,}")
    if begin > len(raw):
        raise _damaged(path, f"{len(raw):,} bytes cannot hold the offsets of {count:,} samples")
    offsets = np.frombuffer(raw[4:begin], "<u4").astype(np.int64)
    if offsets[0] < begin or offsets[-1] != len(raw) or (np.diff(offsets) < 0).any():
        raise _damaged(path, "the offsets of its samples lead outside of it, or backwards")
    return offsets.tolist()


def _split_sample(path: Path, number: int, sample: memoryview, shard: Shard) -> dict[str, memoryview]:
    """{column: bytes}."""
    open_sizes = sum(size is None for _, size in shard.columns.values())
    at = 4 * open_sizes
    if at > len(sample):
        raise _damaged(path, f"sample {number} is shorter than the sizes of its columns")
    stated = iter(np.frombuffer(sample[:at], "<u4").tolist())
    values = {}
    for name, (_, size) in shard.columns.items():
        size = next(stated) if size is None else size
        values[name] = sample[at : at + size]
        at += size
    if at != len(sample):
        raise _damaged(path, f"the columns of sample {number} take {at:,} bytes, and it has {len(sample):,}")
    return values
