"""Reads and writes tensors as safetensors files: header length in 8 bytes, header in JSON, raw bytes.

Why not torch.distributed.checkpoint's own files: their .metadata is a pickle, and whoever can write a
checkpoint could put code into it. These files contain only numbers, and each is checked before it is used.
The header says where each part lies in its tensor, in the form of torch's HuggingFaceStorageReader: torch and
every safetensors tool can read these files, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from common.errors import UserError
from common.json_file import parse_object
from common.schema import Count, naming, parse

SUFFIX = ".safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OFFSETS = "DCP_SHARDING_INFO"  # torch's key in the header; {"version": 1.0} goes with it
CHECKED_ROWS = 4096  # of a matrix at a time
WRITE_CHUNK = 16 << 20  # bytes hashed and written at a time


class Part(NamedTuple):
    """A block of a tensor: where it begins in the whole tensor, and its own shape."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, first_row: int = 0) -> Part:
        """A tensor that is whole, or that begins at this row of the whole."""
        offsets = (first_row, *(0,) * (tensor.ndim - 1))[: tensor.ndim]
        return cls(name, offsets, tuple(tensor.shape), tensor.dtype)

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


@dataclass
class _Offsets:
    saved_offsets: list[Count]


def read_header(path: Path, whole: bool = False) -> dict[Part, Place]:
    """The parts in a file; with `whole`, every tensor in it is one, as in files that others wrote. Raises
    UserError. The library checks that the tensors fill the file and share no byte."""
    try:
        with naming(path), safe_open(path, "np") as file:  # "pt" would map the file to be written to, too
            about = parse_object((file.metadata() or {}).get(OFFSETS, "{}").encode())
            offsets, parts = parse(dict[str, _Offsets], about, OFFSETS), {}
            start = path.stat().st_size
            for name in reversed(file.offset_keys()):  # the last one ends where the file ends
                entry = file.get_slice(name)
                shape, dtype = tuple(entry.get_shape()), DTYPES.get(entry.get_dtype())
                where = (0,) * len(shape) if whole else tuple(offsets[name].saved_offsets)
                if dtype is None or len(where) != len(shape):
                    raise ValueError(f"{name[:100]} is {entry.get_dtype()} and {shape}, which is not read")
                part = Part(name, where, shape, dtype)
                start -= part.bytes
                parts[part] = Place(path, start)
            return dict(reversed(parts.items()))  # in the order of the file
    except (KeyError, SafetensorError) as error:
        raise UserError(f"{path} is damaged, or no file of tensors: {error}") from None


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are; some rows at a time, because isfinite needs memory of its own."""
    return all(bool(torch.isfinite(rows).all()) for rows in tensor.split(CHECKED_ROWS))


def mapped(part: Part, place: Place) -> torch.Tensor:
    """A part as it is in the file; the bytes are read when they are used."""
    raw = np.memmap(place.path, np.uint8, "c", place.start, (part.bytes,))  # c: writing changes only a copy
    tensor = torch.from_numpy(raw).view(part.dtype)
    return tensor.view(part.shape[::-1]).t() if place.transposed else tensor.view(part.shape)
