"""Reads checkpoints of format 1, the first: torch.distributed.checkpoint's own files. They are never written.

Their .metadata is a pickle, and a manifest does not prove who wrote the files. So the pickle may name only
the classes that such a file consists of, and may describe only tensors: torch would unpickle anything else
without a restriction. The tensors themselves are read by torch.load, which allows no code.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, filesystem, metadata

METADATA = ".metadata"
ALLOWED: dict[tuple[str, str], Callable] = {
    (cls.__module__, cls.__name__): cls
    for cls in (
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    )
}
ALLOWED |= {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    **{("torch", name): getattr(torch, name) for name in ("float32", "bfloat16", "int32", "uint8")},
    # the path where it was written, which is not needed; Python 3.13 names the module differently
    **{(module, "PosixPath"): lambda *parts: None for module in ("pathlib", "pathlib._local")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint") from None


class Format1(FileSystemReader):
    """Reads one checkpoint of format 1. `names` are its verified files. Raises ValueError."""

    def __init__(self, folder: Path, names: set[str]):
        super().__init__(folder)
        try:
            with open(folder / METADATA, "rb") as file:
                self.metadata = _Unpickler(file).load()
            _check(self.metadata, names)
        except Exception as error:  # a malformed pickle can raise any type of error
            raise ValueError(f"{METADATA} is refused: {type(error).__name__}: {error}") from None

    def read_metadata(self) -> metadata.Metadata:
        return self.metadata


def _check(found: metadata.Metadata, names: set[str]) -> None:
    for name, tensor in found.state_dict_metadata.items():
        if type(tensor) is not metadata.TensorStorageMetadata:
            raise ValueError(f"{name} is no tensor")
        if type(tensor.size) is not torch.Size or type(tensor.properties.dtype) is not torch.dtype:
            raise ValueError(f"{name} has no size and no dtype")
    for place in found.storage_data.values():
        if place.relative_path not in names or place.transform_descriptors:
            raise ValueError(f"{place.relative_path!r} is not one of its files")
