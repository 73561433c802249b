"""Processes and devices. The only file that reads torchrun's environment or starts a process group."""

from __future__ import annotations

import datetime
import logging
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.config import TrainConfig, UserError

# torch 2.13 renamed these two and warns about the old names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

START_TIMEOUT = datetime.timedelta(hours=6)  # of joining: one rank may have a large dataset to scan first
TIMEOUT = datetime.timedelta(minutes=10)  # of a collective; the first one may wait for compilation


@dataclass(frozen=True)
class World:
    """This process among all of them."""

    rank: int
    local_rank: int  # among the processes of this machine
    size: int
    device: torch.device
    local_size: int = 1  # processes of this machine

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launch_info() -> tuple[int, int, int]:
    """(rank, local_rank, world_size) as torchrun set them; (0, 0, 1) without it."""
    return tuple(int(os.environ.get(name, default)) for name, default in _LAUNCH_VARIABLES)


def machine_size() -> int:
    """Processes of this machine, as torchrun set it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


_LAUNCH_VARIABLES = (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1))


def check_device(config: TrainConfig) -> None:
    """Raises UserError if this process cannot have the device that the configuration names."""
    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise UserError(
            f"device='cuda' but torch {torch.__version__} finds no CUDA GPU; "
            "use --device=cpu, or install a CUDA build of torch and check nvidia-smi"
        )
    _, local_rank, _ = launch_info()
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: torch sees {torch.cuda.device_count()}; "
            f"start with --nproc_per_node={torch.cuda.device_count()} or fewer"
        )
    if config.dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"{torch.cuda.get_device_name()} has no bfloat16; use --dtype=float16")


def init_world(config: TrainConfig) -> World:
    """Picks this process's device and, under torchrun, joins the process group. All ranks."""
    rank, local_rank, size = launch_info()
    if config.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if size > 1:
        backend = config.backend or ("nccl" if config.device == "cuda" else "gloo")
        bind = device if backend == "nccl" else None
        dist.init_process_group(backend, timeout=START_TIMEOUT, device_id=bind)
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    return World(rank, local_rank, size, device, machine_size())


def end_process(world: World) -> None:
    """The last call of a successful run. All ranks. Does not return if there are several.

    Ends them without tearing down: Python destroys a gloo group while it holds the interpreter lock, which
    the group's own thread may need to let go of a tensor, and then neither ends (seen with torch 2.13).
    """
    if world.size == 1:
        return
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()  # NCCL warns about groups that are left open
    leave_now(0)


def leave_now(status: int) -> None:
    """Ends this process at once, with what it has printed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def mean_over_ranks(value: torch.Tensor, world: World) -> torch.Tensor:
    """The mean of a device tensor over all ranks. All ranks; does not wait for the device."""
    return sum_over_ranks(value, world) / world.size


def sum_over_ranks(value: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of a device tensor over all ranks. All ranks; does not wait for the device."""
    value = value.detach().clone()
    if world.size > 1:
        dist.all_reduce(value)
    return value


def gather_objects(value: object, world: World) -> list:
    """[value of rank 0, value of rank 1, ...] on every rank. All ranks."""
    if world.size == 1:
        return [value]
    values = [None] * world.size
    dist.all_gather_object(values, value)
    return values
