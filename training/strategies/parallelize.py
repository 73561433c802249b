"""Strategies: what is replicated and what is sharded over the processes. Each offers the same few verbs:

    forward(x, y)          the loss of one micro-batch, on the training graph
    micro_step(last)       before a micro-step's forward; gradients travel during the last one's backward
    reduce_gradients(loss) after the last backward: every shard.local.grad is the mean over the ranks
    loss_and_norm()        the mean over the ranks of that loss, which may be rounded to reduce_dtype, and the
                           global gradient norm: device tensors, equal on all ranks
    publish()              after the update: every rank's working weights are the new ones
    clear_gradients()
    as_global(shard, t)    a tensor shaped like shard.local as the whole it is part of, for checkpoints

and `shards`: for each parameter, the part that this rank's optimizer updates. Nothing else knows strategies.
"""

from __future__ import annotations

import torch.nn as nn

from training.configuration.keys import TrainConfig
from training.process.world import World
from training.strategies.fsdp import Fsdp
from training.strategies.replicated import Replicated, Zero1

STRATEGIES = {"single": Replicated, "ddp": Replicated, "zero1": Zero1, "fsdp": Fsdp}


def parallelize(model: nn.Module, config: TrainConfig, world: World):
    """The strategy that the configuration asks for, around the initialised model. All ranks."""
    return STRATEGIES[strategy_name(config, world.size)](model, config, world)


def strategy_name(config: TrainConfig, world_size: int) -> str:
    if config.use_fsdp:
        return "fsdp"
    if config.use_zero1:
        return "zero1"
    return "ddp" if world_size > 1 else "single"
