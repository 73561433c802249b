"""Wraps a model in the strategy that the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import UserError
from model import Transformer
from training.configuration.keys import TrainConfig
from training.configuration.rules import shards_optimizer
from training.process.work_timer import WorkTimer
from training.process.world import World
from training.strategies.fsdp import Fsdp
from training.strategies.fused_sums import describe_fusion
from training.strategies.replicated import Replicated
from training.strategies.strategy import Strategy
from training.strategies.zero1 import Zero1

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
    other ranks. All ranks. Raises UserError for what a user's model has and no strategy can train."""
    saved = dict(model.named_parameters(remove_duplicate=False))
    if buffers := [name for name in model.state_dict() if name not in saved]:
        raise UserError(
            f"the model's buffers {', '.join(buffers)} would have no value, and are in no checkpoint: "
            "register them with persistent=False and compute them in init_weights(), as model.py does with "
            "rotary_cos, or make them parameters"
        )
    if not any(parameter.requires_grad for parameter in saved.values()):
        raise UserError("every parameter of the model is frozen (requires_grad=False); leave one to train")
    return STRATEGIES[strategy_name(config, world.size)](model, config, world, timer)


def strategy_name(config: TrainConfig, world_size: int) -> str:
    if config.use_fsdp:
        return "fsdp"
    if shards_optimizer(config, world_size):
        return "zero1"
    return "ddp" if world_size > 1 else "single"


def parallelism_line(config: TrainConfig, strategy: str) -> str:
    """For the start-up report: 'fsdp, hybrid sharding, gradients travel in bfloat16'."""
    several = strategy != "single"
    sums = describe_fusion(config).get("gradient_sums")
    because = f" ({sums['reason']})" if sums and sums["reason"] else ""
    extras = [
        f"{config.fsdp_sharding} sharding" * (config.fsdp_sharding != "full"),
        "reshard after forward" * config.reshard_after_forward,
        f"gradients travel in {config.reduce_dtype}" * (config.reduce_dtype != "float32"),
        f"gradients summed {sums['used']}{because}" if sums else "",
        "NCCL first on the GPU" * (several and config.nccl_goes_first),
        "use_zero1=True has no other process to share with" * (config.use_zero1 and not several),
    ]
    return ", ".join([strategy, *filter(None, extras)])
