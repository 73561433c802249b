"""Lets torch.distributed.checkpoint read the safetensors files of a checkpoint. torch's planners decide which
rank writes what, and which parts of which files a rank reads (resharding); only the storage is ours.

A module of its own: to import torch.distributed.checkpoint takes one to three seconds, and the commands that
only read a configuration do without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

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

from training.checkpoints.tensor_files import Part, Place, mapped


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
