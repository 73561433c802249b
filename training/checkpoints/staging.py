"""Plans what each rank writes of a checkpoint, and holds the host memory that it is copied to first. The
memory is kept from save to save."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from common.errors import UserError
from training.checkpoints.tensor_files import Part
from training.process.world import World, gather_objects

ALIGNMENT = 64  # bytes
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context


def plan_parts(mine: Collection[Part], world: World) -> list[list[Part]]:
    """What each rank writes: every part of every tensor once. What several ranks hold is divided among them,
    so each rank of DDP copies and writes a share of the model. All ranks."""
    holders: dict[Part, list[int]] = {}
    for rank, parts in enumerate(gather_objects(list(mine), world)):
        for part in parts:
            holders.setdefault(part, []).append(rank)
    plans: list[list[Part]] = [[] for _ in range(world.size)]
    sizes = [0] * world.size
    for part in sorted(holders, key=lambda part: (len(holders[part]), -part.bytes)):
        if part.bytes:
            writer = min(holders[part], key=sizes.__getitem__)
            plans[writer].append(part)
            sizes[writer] += part.bytes
    return plans


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
