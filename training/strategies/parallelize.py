"""Wraps a model in the strategy that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from model import Transformer
from training.configuration.keys import TrainConfig
from training.configuration.rules import shards_optimizer
from training.process.work_timer import WorkTimer
from training.process.world import World
from training.strategies.fsdp import Fsdp
from training.strategies.replicated import Replicated, Zero1
from training.strategies.strategy import Strategy

STRATEGIES: dict[str, Callable[[Transformer, TrainConfig, World, WorkTimer | None], Strategy]] = {
    "single": Replicated,
    "ddp": Replicated,
    "zero1": Zero1,
    "fsdp": Fsdp,
}


def parallelize(
    model: Transformer, config: TrainConfig, world: World, timer: WorkTimer | None = None
) -> Strategy:
    """Wraps the initialized, compiled model in its strategy. `timer` measures how long the forward waits for
    other ranks. All ranks."""
    return STRATEGIES[strategy_name(config, world.size)](model, config, world, timer)


def strategy_name(config: TrainConfig, world_size: int) -> str:
    if config.use_fsdp:
        return "fsdp"
    if shards_optimizer(config, world_size):
        return "zero1"
    return "ddp" if world_size > 1 else "single"
