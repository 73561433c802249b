"""What all ranks agree on: one error, one rank's result, the same settings."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from common.errors import RunError, UserError
from common.text import shorten
from training.configuration.keys import TrainConfig
from training.process.launch import machine_number
from training.process.world import CpuGroup, World, from_rank_0, gather_objects

Result = TypeVar("Result")


def agree(world: World, action: Callable[..., Result], *arguments: object) -> Result:
    """This rank's action(*arguments). If it raises UserError on any rank, every rank raises it. All ranks."""
    outcome = _outcome(action, *arguments)
    failures = gather_objects(outcome if isinstance(outcome, UserError) else None, world)
    if failure := next(filter(None, failures), None):
        raise failure
    return cast("Result", outcome)


def from_main(world: World, action: Callable[..., Result], *arguments: object) -> Result:
    """Rank 0's action(*arguments), on every rank, also if it raises UserError. All ranks."""
    outcome = from_rank_0(_outcome(action, *arguments) if world.is_main else None, world)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def divide_on_main(world: World, group: CpuGroup, divide: Callable[[list], list], mine: object) -> Any:
    """This rank's item of divide([mine of rank 0, mine of rank 1, ...]), which rank 0 computes. If it raises,
    every rank raises RunError. `group`: of CPUs, as NCCL would take GPU memory for each rank. All ranks."""
    if world.size == 1:
        return divide([mine])[0]
    everyone: list[Any] | None = [None] * world.size if world.is_main else None
    dist.gather_object(mine, everyone, dst=0, group=group)
    shares, share = [], [None]
    try:
        shares = divide(everyone) if everyone else []
    except Exception as error:  # the others wait for their shares
        why = f"rank 0 could not divide the work among the ranks: {type(error).__name__}: {error}"
        shares = [RunError(why)] * world.size
    dist.scatter_object_list(share, shares, src=0, group=group)
    if isinstance(share[0], RunError):
        raise share[0]
    return share[0]


def _outcome(action: Callable[..., Result], *arguments: object) -> Result | UserError:
    try:
        return action(*arguments)
    except UserError as error:
        return error


# Settings that may differ between machines: what they name is compared by content, or they change no result.
OF_A_MACHINE = ("dataset", "init_weights", "dataloader_num_workers", "dataloader_prefetch_factor")


def check_same_settings(config: TrainConfig, world: World) -> None:
    """Raises UserError, on every rank, if ranks were started with different settings. All ranks."""
    ranks: dict[tuple[str, int], dict[str, list[int]]] = {}  # (setting, machine) -> value -> ranks
    for rank, (machine, settings) in enumerate(
        gather_objects((machine_number()[0], config.to_dict()), world)
    ):
        for name, value in settings.items():
            place = machine if name in OF_A_MACHINE else 0
            ranks.setdefault((name, place), {}).setdefault(repr(value), []).append(rank)
    differing = [
        f"{name} is " + ", ".join(f"{value} on rank {_listed(of)}" for value, of in values.items())
        for (name, _), values in ranks.items()
        if len(values) > 1
    ]
    if differing:
        raise UserError(
            f"the processes of this run were started with different settings: {'; '.join(differing)}. Start "
            "all of them with the same config file and flags"
        )


def check_machines(config: TrainConfig, world: World) -> None:
    """Raises UserError, on every rank, if machines have different numbers of processes, but must not. All
    ranks."""
    if not config.use_fsdp or config.fsdp_sharding != "hybrid":
        return
    mine = machine_number()[0], socket.gethostname(), world.local_size
    machines = sorted(set(gather_objects(mine, world)))
    if len({processes for _, _, processes in machines}) > 1:
        listed = ", ".join(f"{count} on machine {number} ({host})" for number, host, count in machines)
        raise UserError(
            f"fsdp_sharding='hybrid' needs as many processes on each machine, but there are {listed}; give "
            "every torchrun the same --nproc_per_node, or set --fsdp_sharding=full"
        )


def _listed(ranks: list[int]) -> str:
    return shorten(", ".join(map(str, ranks)), 40)
