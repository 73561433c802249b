"""The sizes that the estimate of memory is made of: a run's configuration in bytes, elements and counts."""

from __future__ import annotations

import functools

import model_builder
from model_config import ModelConfig
from training.configuration.choices import find
from training.configuration.keys import RECOMPUTING, TrainConfig
from training.configuration.rules import shards_optimizer
from training.process.launch import machine_size

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Moment = dict[str, float]  # item -> bytes


@functools.cache
def count_parameters(model: ModelConfig) -> int:
    return int(model_builder.build_model(model).count_parameters()["total"])  # on the meta device


class Sizes:
    """The configuration in numbers, which do not change."""

    def __init__(self, config: TrainConfig, world_size: int, native: bool = False):
        model = config.model_config()
        self.config, self.model, self.processes = config, model, world_size
        self.tokens = config.micro_batch * config.block_size  # of a micro-step, on this GPU
        self.gated = model.ffn_type == "swiglu"
        self.up = model.d_ff * (2 if self.gated else 1)  # columns of the feed-forward layer's first matmul
        # elements: of the model, of a block's matrices, of the head's; of embeddings and head, once if tied
        self.parameters = count_parameters(model)
        self.block = model.block_matrices
        self.head = model.vocab_size * model.n_embd
        self.rest = self.parameters - model.n_layer * self.block
        # parts: into which FSDP cuts everything, and into which weights and what the optimizer keeps are cut
        group = min(machine_size(), world_size) if config.fsdp_sharding == "hybrid" else world_size
        self.shards = group if config.use_fsdp else 1
        self.optimizer_shards = world_size if shards_optimizer(config, world_size) else self.shards
        # bytes of an element: of a stored weight, of an activation, of a gradient that is sent
        self.stored, self.compute = BYTES[config.param_dtype], BYTES[config.dtype]
        self.reduce = BYTES[config.reduce_dtype]
        # low precision: of which blocks, of the head, and what matmuls get and keep in both (ops/recipe.py)
        recipe = config.low_precision
        blocks = range(config.low_precision_skip_first, model.n_layer - config.low_precision_skip_last)
        self.low_blocks = range(0) if recipe == "none" else blocks
        self.low_head = recipe != "none" and config.low_precision_scope == "layers_and_head"
        self.low, self.in_head = find("low_precision", recipe).forms(native)
        self.quantizes = bool(self.low.weight)
        # whether parts of every block are made again (ops/recompute.py)
        self.recomputes = config.activation_checkpointing in RECOMPUTING
        self.keeps_activated = find("ffn_backend", config.ffn_backend).keeps_input
