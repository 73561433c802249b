"""Reads and writes tensors as safetensors files: header length in 8 bytes, header in JSON, raw bytes.

Why not torch.distributed.checkpoint's own files: their .metadata is a pickle, and whoever can write a
checkpoint could put code into it. These files contain only numbers, and each is checked before it is used.
torch's planners still decide which rank writes what, and which parts of which files a rank reads
(resharding); only the storage is ours. The header says where each part lies in its tensor, in the form of
torch's HuggingFaceStorageReader: torch and every safetensors tool can read these files, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from common.json_file import parse_object

SUFFIX = ".safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OFFSETS = "DCP_SHARDING_INFO"  # torch's key in the header; {"version": 1.0} goes with it
MAX_HEADER = 100 << 20  # bytes
CHECKED_ROWS = 4096  # of a matrix at a time
WRITE_CHUNK = 16 << 20  # bytes hashed and written at a time


class Part(NamedTuple):
    """A block of a tensor: where it begins in the whole tensor, and its own shape."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The row after its last one."""
        return self.offsets[0] + self.shape[0]


# --- writing ---


def write_parts(path: Path, parts: list[tuple[Part, torch.Tensor]]) -> dict:
    """Writes and syncs a new file. Returns {sha256, bytes} of what should be in it, so that the caller can
    detect a disk that stored something else. Tensors on a GPU are copied to host memory one by one."""
    parts = sorted(parts, key=lambda item: -item[0].dtype.itemsize)  # aligns every number
    offsets = {part.name: {"saved_offsets": part.offsets} for part, _ in parts}
    about = {OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0"}
    return write_tensors(path, [part for part, _ in parts], (tensor for _, tensor in parts), about)


def write_tensors(path: Path, parts: list[Part], tensors: Iterable[torch.Tensor], about: dict) -> dict:
    """The same for tensors that are made one after another, so that one at a time is in memory. `about`:
    what the header says besides."""
    sha256, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in _chunks(parts, tensors, about):
            sha256.update(chunk)  # hashing and writing release the interpreter lock
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": sha256.hexdigest(), "bytes": size}


def _chunks(parts: list[Part], tensors: Iterable[torch.Tensor], about: dict) -> Iterator[bytes | memoryview]:
    yield _header(parts, about)
    for part, tensor in zip(parts, tensors, strict=True):
        assert (tensor.shape, tensor.dtype) == (part.shape, part.dtype), part
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), WRITE_CHUNK):
            yield content[start : start + WRITE_CHUNK]


def _header(parts: list[Part], about: dict) -> bytes:
    entries, end = {}, 0
    for part in parts:
        begin, end = end, end + part.bytes
        entries[part.name] = {"dtype": NAMES[part.dtype], "shape": part.shape, "data_offsets": [begin, end]}
    assert len(entries) == len(parts), "a file holds one part of a tensor"
    header = json.dumps({"__metadata__": {**about, "format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


# --- reading ---


class Place(NamedTuple):
    """Where a part's bytes are in a file."""

    path: Path
    start: int
    transposed: bool = False  # the file has the columns of a matrix as rows


def read_header(path: Path, whole: bool = False) -> dict[Part, Place]:
    """The parts in a file; with `whole`, every tensor in it is one, as in files that others wrote. Raises
    ValueError if the header is not valid, or points outside the file."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise ValueError(f"a header of {length:,} bytes")
            header = parse_object(file.read(length), unique=True)
        about = header.pop("__metadata__", {})
        offsets = {} if whole else parse_object(about[OFFSETS].encode())
        parts, spans = {}, []
        for name, entry in header.items():
            begin, end = _numbers(entry["data_offsets"])
            shape = _numbers(entry["shape"])
            where = (0,) * len(shape) if whole else _numbers(offsets[name]["saved_offsets"])
            part = Part(name, where, shape, DTYPES[entry["dtype"]])
            fits = end - begin == part.bytes > 0 and 8 + length + end <= size
            if len(where) != len(shape) or not fits:
                raise ValueError(f"{name} does not fit its place")
            parts[part] = Place(path, 8 + length + begin)
            spans.append((begin, end))
        spans.sort()
        if any(begin < end for (_, end), (begin, _) in zip(spans, spans[1:], strict=False)):
            raise ValueError("two tensors share bytes")
        return parts
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path.name} is not a file of tensors: {type(error).__name__}: {error}") from None


def _numbers(value: list) -> tuple[int, ...]:
    if not all(type(number) is int and 0 <= number < 2**63 for number in value):
        raise ValueError(f"{value!r} are not sizes")
    return tuple(value)


class TensorFiles(StorageReader):
    """Lets torch.distributed.checkpoint read such files. Raises ValueError if a tensor is incomplete.

    halves: names of tensors whose files have the even rows first, then the odd ones: Hugging Face's gate_proj
    and up_proj, and our own checkpoints of format 2. They are read as row 0, 1, 2, ...
    """

    def __init__(self, parts: Iterable[tuple[Part, Place]], halves: Collection[str] = ()):
        self.places: dict[MetadataIndex, tuple[Part, Place]] = {}
        tensors = defaultdict(list)
        for part, place in parts:
            tensors[part.name].append(part)
            self.places[MetadataIndex(part.name, part.offsets)] = part, place
        self.parts = {name: sorted(found, key=lambda part: part.offsets) for name, found in tensors.items()}
        self.halves = frozenset(halves)
        self.metadata = Metadata({name: _whole(name, found) for name, found in self.parts.items()})
        for name in self.halves & self.parts.keys():
            self.metadata.state_dict_metadata[name] = _whole(name, [_joined(name, self.parts[name])])

    def read_rows(self, name: str, rows: range) -> torch.Tensor:
        """These rows of a tensor; a copy in memory only if they are in several places."""
        if name not in self.halves:
            return self._stored_rows(name, rows)
        if rows.step == 2:
            half = self.parts[name][-1].end // 2
            first = rows.start // 2 + half * (rows.start % 2)
            return self._stored_rows(name, range(first, first + len(rows)))
        assert rows.step == 1, rows
        one, *_ = self.parts[name]
        both = torch.empty(len(rows), *one.shape[1:], dtype=one.dtype)
        for i in range(min(2, len(rows))):
            both[i::2] = self.read_rows(name, rows[i::2])
        return both

    def _stored_rows(self, name: str, rows: range) -> torch.Tensor:
        """The same, counted in the order of the files."""
        found = []
        for part in self.parts[name]:
            start, step = part.offsets[0], rows.step
            mine = range(max(rows.start, start + (rows.start - start) % step), min(rows.stop, part.end), step)
            if mine:
                tensor = mapped(*self.places[MetadataIndex(name, part.offsets)])
                found.append(tensor[mine.start - start : mine.stop - start : step])
        return found[0] if len(found) == 1 else torch.cat(found)

    def read_metadata(self) -> Metadata:
        return self.metadata

    def read_data(self, plan, planner) -> Future[None]:
        for item in plan.items:
            spans = list(zip(item.storage_offsets, item.lengths, strict=True))
            if (name := item.storage_index.fqn) in self.halves:
                first, length = spans[0]
                tensor, spans[0] = self.read_rows(name, range(first, first + length)), (0, length)
            else:
                tensor = mapped(*self.places[item.storage_index])
            for dim, (start, length) in enumerate(spans):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata, is_coordinator) -> None: ...

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    def reset(self, checkpoint_id=None) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return False


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are; some rows at a time, because isfinite needs memory of its own."""
    return all(bool(torch.isfinite(rows).all()) for rows in tensor.split(CHECKED_ROWS))


def _whole(name: str, parts: list[Part]) -> TensorStorageMetadata:
    """What torch's planner must know of a tensor: its size, which its parts must fill, and the parts."""
    ends = [tuple(map(sum, zip(part.offsets, part.shape, strict=True))) for part in parts]
    if len({(len(part.shape), part.dtype) for part in parts}) > 1:
        raise ValueError(f"the parts of {name} are not of one kind")
    size = torch.Size([max(along) for along in zip(*ends, strict=True)])
    if not _fill(parts, size):
        raise ValueError(f"the parts of {name} do not make {tuple(size)}")
    chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in parts]
    return TensorStorageMetadata(TensorProperties(dtype=parts[0].dtype), size, chunks)


def _joined(name: str, parts: list[Part]) -> Part:
    """Halves as one part, because none of theirs has rows that follow each other in the whole."""
    one, last = parts[0], parts[-1]
    if not one.shape or last.end % 2:
        raise ValueError(f"the rows of {name} are not pairs")
    return one._replace(shape=(last.end, *one.shape[1:]))


def _fill(parts: list[Part], size: torch.Size) -> bool:
    """Whether the parts, rows of the tensor as every strategy divides it, follow each other without a gap."""
    if len(parts) == 1:
        return not any(parts[0].offsets)
    end = 0
    for part in sorted(parts, key=lambda part: part.offsets):
        is_next = part.offsets[:1] == (end,) and not any(part.offsets[1:]) and part.shape[1:] == size[1:]
        if not is_next:
            return False
        end += part.shape[0]
    return True


def mapped(part: Part, place: Place) -> torch.Tensor:
    """A part as it is in the file; the bytes are read when they are used."""
    raw = np.memmap(place.path, np.uint8, "c", place.start, (part.bytes,))  # c: writing changes only a copy
    tensor = torch.from_numpy(raw).view(part.dtype)
    return tensor.view(part.shape[::-1]).t() if place.transposed else tensor.view(part.shape)
