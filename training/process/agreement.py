"""What all ranks agree on: one error, one rank's result, the same settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from common.errors import UserError
from common.text import shorten
from training.configuration.keys import TrainConfig
from training.process.launch import machine_number
from training.process.world import World, gather_objects

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
    outcome = gather_objects(_outcome(action, *arguments) if world.is_main else None, world)[0]
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


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


def _listed(ranks: list[int]) -> str:
    return shorten(", ".join(map(str, ranks)), 40)
