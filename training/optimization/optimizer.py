"""Defines what training asks of an optimizer. Checkpoints, the estimate of memory, the replica check and the
report know no single one: they ask the class that the key `optimizer` names.

A new optimizer is one file: a subclass of Optimizer, which the module calls OPTIMIZER. It is found by
--optimizer=package.module, or by a name in CHOICES (training/configuration/choices.py). tests/support/lion.py
is an example.
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn

import model_builder
from model_config import ModelConfig
from ops.quantization.random_bits import bf16_stochastically, weight_key
from training.configuration.choices import find
from training.configuration.keys import TrainConfig
from training.configuration.seeds import WEIGHT_ROUNDING, stream_seed
from training.strategies.strategy import Shard


class Kept(NamedTuple):
    """A tensor that an optimizer keeps of a parameter: its rows are the parameter's, or it is one number."""

    item: str  # of the memory estimate, where it is counted
    shape: tuple[int, ...]
    dtype: torch.dtype


class Optimizer(ABC):
    """Updates this rank's shards. What it keeps of them is allocated here, so that a checkpoint can be loaded
    into it and an out-of-memory error comes before the first step.

    weight_rounding='stochastic' rounds what is stored in bf16 up or down at random, so that it is right on
    average: to nearest, an update below 2^-9 of a weight is lost. The random bits are a function of the seed,
    the weight, its count of updates, and the element's index in the whole weight. So every strategy and
    number of ranks makes the same weights, replicas stay equal, and a resume needs only the counts.
    """

    writes_copies = False  # whether step() also writes the shards' working copies, so that publish() need not
    settings: tuple[str, ...] = ()  # keys that only some optimizers read, and this one does
    # {key: values}: what is kept with one of them is not converted, so a resume may not change from or to it
    unconverted: dict[str, tuple] = {}
    # settings with which it keeps less: somewhat less, and the least; both are proposed if memory is short
    smaller: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    # --- facts, which need neither a device nor weights ---

    @classmethod
    @abstractmethod
    def keeps(cls, name: str, shape: torch.Size, config: TrainConfig) -> dict[str, Kept]:
        """What it keeps of a whole parameter; among it its count of updates, "step", fp32 ()."""

    @classmethod
    def update_bytes(cls, config: TrainConfig, shards: int) -> dict[str, float]:
        """{item of the memory estimate: bytes} that an update needs beside what is kept, on each rank, where
        weights are divided into so many shards."""
        return {}

    @classmethod
    def describe(cls, weights: dict[str, torch.Tensor], config: TrainConfig) -> dict[str, Any]:
        """The record's startup_info.optimizer; `weights` are the whole model's that are not frozen."""
        groups = [
            group_of([weight for weight in weights.values() if weight.ndim >= 2], config.weight_decay),
            group_of([weight for weight in weights.values() if weight.ndim < 2], 0.0),
        ]
        return {"type": cls.__name__, "weight_rounding": config.weight_rounding, "param_groups": groups}

    @classmethod
    def line(cls, config: TrainConfig) -> str:
        """What the start-up report says after the type."""
        return ""

    @classmethod
    def warnings(cls, config: TrainConfig) -> list[str]:
        """Values that are allowed and probably not meant, with the fix."""
        rate, decay = config.learning_rate, config.weight_decay
        texts = {
            f"learning_rate={rate:g} times weight_decay={decay:g} is at least 1: an update at that rate "
            "decays weights to 0 or beyond; lower weight_decay, 0.1 is usual": rate * decay >= 1,
            "learning_rate=0 changes no weight; a test of the speed needs no change": rate == 0,
        }
        return [text for text, holds in texts.items() if holds]

    # --- the object ---

    def __init__(self, shards: list[Shard], config: TrainConfig, row_group: dist.ProcessGroup | None = None):
        """shards: of the whole model, in its order; the frozen ones are left out. row_group: the ranks that
        share the rows of matrices (Strategy.row_group)."""
        self.config = config
        self.shards = [shard for shard in shards if shard.trains]
        self.state = {shard.name: self._zeros(shard) for shard in self.shards}
        # key and first element of each weight's random bits; a weight's number is its place in the model
        self.roundings: dict[str, tuple[torch.Tensor, int]] = {}
        if config.weight_rounding == "stochastic":
            seed = stream_seed(config.seed, WEIGHT_ROUNDING) >> 1  # 63 bits
            for number, shard in enumerate(shards):
                self.roundings[shard.name] = weight_key(seed, number, shard.local.device), shard.start

    def _zeros(self, shard: Shard) -> dict[str, torch.Tensor]:
        rows = shard.local.shape[:1]
        return {
            name: torch.zeros(
                (*rows, *kept.shape[1:]) if kept.shape else (), dtype=kept.dtype, device=shard.local.device
            )
            for name, kept in self.keeps(shard.name, shard.parameter.shape, self.config).items()
        }

    def kept(self, shard: Shard) -> dict[str, torch.Tensor]:
        """What is kept of a shard, by name; nothing of a frozen one."""
        return self.state.get(shard.name, {})

    def decay(self, shard: Shard) -> float:
        """Of matrices alone, embeddings too."""
        return self.config.weight_decay if shard.is_matrix else 0.0

    @abstractmethod
    def step(self, rate: torch.Tensor, divisor: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Updates every shard by shard.grad / divisor. found_inf = 1: leaves every bit as it is. All are fp32
        (), on the device: nothing may wait for them, and a captured update reads them anew."""

    def count(self, shards: list[Shard], found_inf: torch.Tensor) -> list[torch.Tensor]:
        """The shards' steps, with this update, if it is made."""
        steps = [self.state[shard.name]["step"] for shard in shards]
        torch._foreach_add_(steps, [1 - found_inf] * len(steps))  # a list, or the host would read it
        return steps

    def write(self, shard: Shard, new: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Stores a new weight, fp32, rounded as the key weight_rounding says, unless found_inf is 1."""
        weight, rounding = shard.local, self.roundings.get(shard.name)
        if rounding is not None and weight.dtype == torch.bfloat16:
            key, start = rounding
            key[1].copy_(self.state[shard.name]["step"])
            new = bf16_stochastically(new, key, start=start)
        weight.copy_(torch.where(found_inf > 0, weight, new.to(weight.dtype)))


def group_of(weights: Collection[torch.Tensor], decay: float) -> dict[str, Any]:
    """One of the record's param_groups."""
    return {"weight_decay": decay, "tensors": len(weights), "params": sum(w.numel() for w in weights)}


# --- the one that a run has ---


def optimizer_class(config: TrainConfig) -> type[Optimizer]:
    """Raises UserError."""
    found: type[Optimizer] = find("optimizer", config.optimizer)
    return found


def build_optimizer(
    shards: list[Shard], config: TrainConfig, row_group: dist.ProcessGroup | None = None
) -> Optimizer:
    return optimizer_class(config)(shards, config, row_group)


def describe_optimizer(model: nn.Module, config: TrainConfig) -> dict[str, Any]:
    weights: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return optimizer_class(config).describe(weights, config)


def optimizer_warnings(config: TrainConfig) -> list[str]:
    return [] if config.eval_only else optimizer_class(config).warnings(config)


@functools.cache
def trained_shapes(model: ModelConfig) -> dict[str, torch.Size]:
    """Of the parameters that are not frozen. The model is built on the meta device."""
    named = model_builder.build_model(model).named_parameters()
    return {name: weight.shape for name, weight in named if weight.requires_grad}


@functools.cache
def _alike(model: ModelConfig) -> Counter[tuple[str, torch.Size]]:
    """How many parameters have this name, with the first block's number for all, and this shape."""
    named = trained_shapes(model).items()
    return Counter((re.sub(r"^blocks\.\d+\.", "blocks.0.", name), shape) for name, shape in named)


def kept_bytes(config: TrainConfig) -> dict[str, int]:
    """{item of the memory estimate: bytes that are kept of the whole model}, but for single numbers."""
    items: Counter[str] = Counter()
    keeps = optimizer_class(config).keeps
    for (name, shape), count in _alike(config.model_config()).items():
        for item, kept, dtype in keeps(name, shape, config).values():
            if kept:
                items[item] += count * math.prod(kept) * dtype.itemsize
    return dict(items)
