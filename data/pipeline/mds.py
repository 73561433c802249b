"""Reads MosaicML's MDS shards, as version 0.13 of mosaicml-streaming writes them; the package is not needed.

    index.json  of each shard: its columns, with encodings and fixed sizes; file names, bytes, hashes; samples
    shard       uint32 samples · uint32 offset of each sample and of the end · JSON of the columns · samples
    sample      uint32 size of each column that has no fixed size · the values of the columns

The trap: every count, size and offset may be hostile, so it is checked before its use. Nothing is unpickled.
"""

import functools
import hashlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.errors import UserError
from common.json_file import open_regular, read_json
from common.text import shown
from data.folders import is_plain_name
from data.pipeline.bad_records import BadRecord
from data.pipeline.decompression import CODECS, is_disk_error, open_decompressed
from data.pipeline.token_files import is_count, looks_wider

INDEX = "index.json"
MOST_BYTES = 2**32 - 1  # of a shard: its offsets have four bytes
CHECKED_SAMPLES = 64  # of a shard, to see whether its ids have the type that is said
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
# of an ndarray whose type is in its first byte; others are floats, which are no ids
DTYPE_CODES = dict(zip((8, 9, 16, 17, 32, 33, 64, 65), INTEGERS, strict=True))


class FileInfo(NamedTuple):
    name: str  # relative to the folder of index.json
    size: int
    hashes: dict[str, str]


class Shard(NamedTuple):
    columns: dict[str, tuple[str, int | None]]  # name -> (encoding, size if it is fixed), in their order
    codec: str  # "" if it is not compressed
    files: tuple[FileInfo, ...]  # raw, and compressed or raw again
    samples: int


class Columns(NamedTuple):
    tokens: str
    lengths: str | None  # of the documents in a sample
    split_at: int | None  # without lengths: the id that ends a document
    bytes_dtype: str  # of the encoding 'bytes'


def _field(entry: Any, name: str, kind: type) -> Any:
    """A field of an object in index.json, whose type is certain then, and that no number is too large."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if type(value) is not kind or kind is int and not is_count(value, MOST_BYTES):
        raise ValueError(f"{name} is {value!r:.80} in {entry!r:.80}")
    return value


@functools.lru_cache(8)
def read_index(path: Path) -> list[Shard]:
    """Raises UserError for anything that is not an index of MDS shards."""
    try:
        index = read_json(path, 1 << 28)  # about 700 bytes a shard
        if index.get("version") != 2 or not _field(index, "shards", list):
            raise ValueError(f"it has version {index.get('version')!r:.40} (2 is read), or names no shards")
        return [_read_shard(shard) for shard in index["shards"]]
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no index of MDS shards ({error}); name the folder of MDSWriter") from None


def _read_shard(entry: Any) -> Shard:
    if _field(entry, "format", str) != "mds" or entry.get("version") != 2:
        raise ValueError(f"a shard has format {entry['format']!r:.40}, and 'mds' of version 2 is read")
    lists = (_field(entry, f"column_{what}", list) for what in ("names", "encodings", "sizes"))
    names, encodings, sizes = lists
    texts = all(isinstance(name, str) for name in (*names, *encodings))
    if not texts or len({len(names), len(encodings), len(sizes), len(set(names))}) != 1:
        raise ValueError(f"the columns are {names!r:.80}, their encodings {encodings!r:.80}")
    if wrong := [size for size in sizes if size is not None and not is_count(size, MOST_BYTES)]:
        raise ValueError(f"a column has the size {wrong[0]!r:.80}")
    columns = {names[k]: (encodings[k], sizes[k] or None) for k in range(len(names))}
    codec = "" if entry.get("compression") is None else _field(entry, "compression", str).partition(":")[0]
    files = []
    for info in (entry.get("raw_data"), entry.get("zip_data") or entry.get("raw_data")):
        name, size = _field(info, "basename", str), _field(info, "bytes", int)
        if not all(map(is_plain_name, name.split("/"))):
            raise ValueError(f"the file name {name!r:.80} leads out of the folder")
        hashes = _field(info, "hashes", dict) if info.get("hashes") else {}
        for kind in hashes:
            _digest(kind, b"")
            _field(hashes, kind, str)
        files.append(FileInfo(name, size, hashes))
    return Shard(columns, codec, tuple(files), _field(entry, "samples", int))


def _digest(kind: str, content: bytes) -> str:
    if kind in hashlib.algorithms_guaranteed and not kind.startswith("shake"):
        return hashlib.new(kind, content, usedforsecurity=False).hexdigest()
    if not re.fullmatch("xxh(32|64|128|3_64|3_128)", kind) or importlib.util.find_spec("xxhash") is None:
        raise ValueError(f"its hashes are of the kind {kind!r:.40}, which is not known or needs xxhash")
    return getattr(importlib.import_module("xxhash"), kind)(content).hexdigest()


def find_shards(folders: list[str], columns: Mapping[str, Callable[[str], str | None]]) -> list[Path]:
    """The files of all shards, in their order. columns: {name: what is wrong with an encoding, or None}."""
    files = []
    for folder, shard in ((Path(f), s) for f in dict.fromkeys(folders) for s in read_index(Path(f) / INDEX)):
        is_raw = (folder / shard.files[0].name).is_file()
        info = shard.files[0 if is_raw else -1]
        path = folder / info.name
        if not path.is_file():
            raise UserError(f"{path} is missing: the folder was not copied whole")
        if path.stat().st_size != info.size:
            sizes = f"it has {path.stat().st_size:,} bytes, {INDEX} says {info.size:,}"
            raise UserError(f"{path} is damaged: {sizes}; copy it anew")
        if not is_raw and shard.codec not in CODECS:
            fix = f"decompress the shards, or write them with one of {', '.join(CODECS)}"
            raise UserError(f"{path} is compressed by {shown(shard.codec)}; {fix}")
        for column, wrong in columns.items():
            if column not in shard.columns:
                raise UserError(f"{path} has no column {column!r}; it has {', '.join(shard.columns)}")
            if problem := wrong(shard.columns[column][0]):
                raise UserError(f"the column {column!r} of {path} {problem}")
        files.append(path)
    return files


def read_samples(path: Path, columns: list[str]) -> Iterator[list[tuple[str, memoryview]]]:
    """Of each sample, (encoding, bytes) of these columns. The whole shard is in memory, checked first."""
    # the index of several writers is in a folder above
    indexed = [(folder, folder / INDEX) for folder in list(path.parents)[:5] if (folder / INDEX).is_file()]
    named = [(s, i) for f, index in indexed for s in read_index(index) for i in s.files if f / i.name == path]
    if not named:
        raise UserError(f"no {INDEX} beside {path} names it")
    shard, info = named[0]
    try:
        with open_regular(path) as file:
            content = _compared(file.read(info.size + 1), info)
        if info is not shard.files[0]:
            with open_decompressed(io.BytesIO(content), shard.codec) as file:
                # no more is unpacked, whatever the content claims
                content = _compared(file.read(shard.files[0].size + 1), shard.files[0])
        for values in _split(memoryview(content), shard):
            yield [(shard.columns[column][0], values[column]) for column in columns]
    except Exception as error:  # each codec raises errors of its own
        if isinstance(error, UserError | MemoryError) or is_disk_error(error):
            raise
        raise UserError(f"{path} is damaged: {error}; copy it anew") from None


def _compared(content: bytes, info: FileInfo) -> bytes:
    """The content, if it is what index.json says of the file."""
    if len(content) != info.size:
        found = f"{len(content):,}" if len(content) < info.size else f"more than {info.size:,}"
        raise ValueError(f"{info.name} has {found} bytes, {INDEX} says {info.size:,}")
    for kind, recorded in info.hashes.items():
        if (found := _digest(kind, content)) != recorded:
            raise ValueError(f"the {kind} of {info.name} is {found}, {INDEX} says {shown(recorded)}")
    return content


def _split(raw: memoryview, shard: Shard) -> Iterator[dict[str, memoryview]]:
    """{column: bytes} of each sample."""
    count = int.from_bytes(raw[:4], "little")
    begin = 4 + 4 * (count + 1)
    if count != shard.samples:
        raise ValueError(f"it says that it has {count:,} samples, {INDEX} says {shard.samples:,}")
    if begin > len(raw):
        raise ValueError(f"{len(raw):,} bytes cannot hold the offsets of {count:,} samples")
    offsets = np.frombuffer(raw[4:begin], "<u4").astype(np.int64)
    if offsets[0] < begin or offsets[-1] != len(raw) or (np.diff(offsets) < 0).any():
        raise ValueError("the offsets of its samples lead outside of it, or backwards")
    for number, (first, after) in enumerate(zip(offsets.tolist(), offsets[1:].tolist(), strict=False)):
        sample, values = raw[first:after], {}
        at = 4 * sum(size is None for _, size in shard.columns.values())
        stated = iter(np.frombuffer(sample[: len(sample) // 4 * 4][:at], "<u4").tolist())
        for name, (_, size) in shard.columns.items():
            size = next(stated, MOST_BYTES) if size is None else size
            values[name] = sample[at : at + size]
            at += size
        if at != len(sample):
            raise ValueError(f"the columns of sample {number} take {at:,} bytes, and it has {len(sample):,}")
        yield values


def wrong_numbers(encoding: str) -> str | None:
    """What is wrong with an encoding for a column of ids or lengths."""
    known = re.fullmatch(rf"bytes|ndarray(:({'|'.join(INTEGERS)})(:\d+)?)?", encoding)
    fix = "ids are whole numbers, as 'ndarray' or 'bytes' ('pkl' can run any code and is never read)"
    return None if known else f"has the encoding {encoding!r:.40}; {fix}"


def decode_numbers(encoding: str, value: memoryview, bytes_dtype: str) -> np.ndarray:
    """The numbers (N,) of a column, int64. bytes_dtype: of the encoding 'bytes'. Raises ValueError."""
    dtype, *shape = encoding.split(":")[1:] or [bytes_dtype if encoding == "bytes" else ""]
    count = int(shape[0]) if shape else None
    if not dtype:
        if (code := value[0] if len(value) else None) not in DTYPE_CODES:
            raise ValueError(f"an array of the type {code}, not of whole numbers")
        dtype, value = DTYPE_CODES[code], value[1:]
    if encoding != "bytes" and not shape:
        # of the first byte: axes, and two bits for the bytes of the size that follows
        begin = 1 + (1 << (value[0] & 3)) if len(value) else 1
        if len(value) < begin or value[0] >> 2 != 1:
            raise ValueError(f"an array of {value[0] >> 2 if len(value) else 0} axes (1 is read), or cut off")
        count, value = int.from_bytes(value[1:begin], "little"), value[begin:]
    stored = np.dtype(dtype).newbyteorder("<")
    if len(value) % stored.itemsize or count not in (None, len(value) // stored.itemsize):
        expected = "numbers" if count is None else f"{count:,} numbers"
        raise ValueError(f"{len(value):,} bytes are not {expected} of the type {dtype}")
    return np.frombuffer(value, stored).astype(np.int64)


def read_tokens(path: Path, columns: Columns) -> Iterator[tuple[int, list[np.ndarray] | BadRecord]]:
    """(number, ids of each document) of every sample; the last document ends with it."""
    samples = list(read_samples(path, [name for name in (columns.tokens, columns.lengths) if name]))
    if samples and samples[0][0][0] == "bytes":
        content = b"".join(ids[1] for ids, *_ in samples[:CHECKED_SAMPLES])
        stored = np.dtype(columns.bytes_dtype)
        if looks_wider(np.frombuffer(content, stored, len(content) // stored.itemsize)):
            wide = f"every second id in {path} is 0 or very small if ids are {stored}, so they have more bits"
            raise UserError(f"{wide}: pass another --bytes_dtype (int64 is the default)")
    for number, values in enumerate(samples):
        try:
            ids, *lengths = (decode_numbers(*value, columns.bytes_dtype) for value in values)
            ends = np.flatnonzero(ids == columns.split_at) + 1
            ends = np.cumsum(checked_lengths(lengths[0], ids)) if lengths else ends
            yield number, np.split(ids, ends[ends < len(ids)])
        except ValueError as error:
            yield number, BadRecord(f"{path}, sample {number}: {error}")


def checked_lengths(lengths: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if len(ids) > 1 and len(lengths) == len(ids) and set(np.unique(lengths)) <= {0, 1}:
        raise ValueError("the column of --lengths is a mask of zeros and ones, not the lengths of documents")
    lengths = lengths[lengths != 0]
    if (lengths < 0).any() or (lengths > len(ids)).any() or int(lengths.sum()) != len(ids):
        raise ValueError(f"lengths {lengths[:5].tolist()}.. that do not add up to its {len(ids):,} tokens")
    return lengths
