"""Plans what each rank writes of a checkpoint, and holds the host memory that it is copied to first. The
memory is kept from save to save."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from common.errors import UserError
from training.checkpoints.tensor_files import Part
from training.process.agreement import divide_on_main
from training.process.world import CpuGroup, World

ALIGNMENT = 64  # bytes
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context


def plan_parts(mine: Iterable[Part], world: World, group: CpuGroup) -> tuple[list[Part], int]:
    """What this rank writes of a checkpoint, and the bytes of all of it. Rank 0 plans, from 16 bytes for each
    part that a rank holds. `group`: of CPUs. All ranks."""
    parts = [part for part in mine if part.bytes]
    hashes = b"".join(hashlib.sha256(repr(part).encode()).digest()[:8] for part in parts)
    held = np.array([np.frombuffer(hashes, np.int64), [part.bytes for part in parts]], np.int64)
    places, size = divide_on_main(world, group, divide, held)
    return [parts[place] for place in places], size


def divide(held: list[np.ndarray]) -> list[tuple[list[int], int]]:
    """For each rank: where in its own list the parts are that it writes, and the bytes of all parts. Every
    part is written once. What several ranks hold is divided among them, so each rank of DDP copies and writes
    a share of the model. `held`: of each rank, (2, parts), hash and bytes of each part."""
    ranks = np.repeat(np.arange(len(held)), [each.shape[1] for each in held])
    places = np.concatenate([np.arange(each.shape[1]) for each in held])
    hashes, sizes = np.concatenate(held, axis=1)
    _, first, part_of, count = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    by_part, ends = np.argsort(part_of, kind="stable"), np.cumsum(count)  # the copies of a part, by rank
    plans: list[list[int]] = [[] for _ in held]
    written = np.zeros(len(held), np.int64)
    for part in np.lexsort((first, -sizes[first], count)):  # what one rank alone has comes first
        copies = by_part[ends[part] - count[part] : ends[part]]
        copy = copies[written[ranks[copies]].argmin()]
        plans[ranks[copy]].append(int(places[copy]))
        written[ranks[copy]] += sizes[copy]
    return [(plan, int(written.sum())) for plan in plans]


class Staging:
    """Host memory with one copy of this rank's parts."""

    def __init__(self, parts: list[Part], device: torch.device):
        self.device = device
        starts, end = [], 0
        for part in parts:
            starts.append(end)
            end += -(-part.bytes // ALIGNMENT) * ALIGNMENT
        memory = torch.zeros(end, dtype=torch.uint8)  # zeros, so that its pages exist before a save
        if device.type == "cuda":
            _pin(self, memory)
        self.copies = [
            memory[start : start + part.bytes].view(part.dtype).view(part.shape)
            for part, start in zip(parts, starts, strict=True)
        ]

    @torch.no_grad()
    def copy(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies the tensors to host memory, on the training's stream, so after the last update. When it
        returns, the originals may change."""
        for copy, tensor in zip(self.copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # sync point
        return self.copies


def _pin(owner: Staging, memory: torch.Tensor) -> None:
    """Page-locks the memory in place: torch's pinned allocator would round gigabytes up to a power of two."""
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE))
    if status:
        raise UserError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory for checkpoints cannot be page-locked (CUDA "
            f"error {status}); set --async_checkpoint=False"
        )
    weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr())
