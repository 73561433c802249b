"""The sizes that the estimate of memory is made of: a run's configuration in bytes, elements and counts."""

from __future__ import annotations

from dataclasses import dataclass

from model_config import ModelConfig
from ops.recipes import EMULATED
from training.configuration.keys import TrainConfig
from training.configuration.rules import shards_optimizer
from training.process.world import machine_size

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Moment = dict[str, float]  # item -> bytes


@dataclass(frozen=True)
class Sizes:
    """The configuration in numbers: bytes, unless the name says otherwise."""

    model: ModelConfig
    config: TrainConfig
    parameters: int  # elements
    block: int  # elements of one block's matrices
    head: int  # elements of the output head's matrix
    rest: int  # elements outside of the blocks: embeddings and head, once if they are tied
    shards: int  # into so many parts FSDP cuts everything; 1: whole
    adam_shards: int  # into so many parts the optimizer's weights and moments are cut
    stored: int  # of an element, in param_dtype
    compute: int  # of an element, in dtype
    reduce: int  # of an element, in reduce_dtype
    processes: int
    tokens: int  # of a micro-step, on this GPU

    @classmethod
    def of(cls, model: ModelConfig, parameters: int, config: TrainConfig, world_size: int) -> Sizes:
        block = block_weights(model)
        shards = 1
        if config.use_fsdp:
            shards = min(machine_size(), world_size) if config.fsdp_sharding == "hybrid" else world_size
        return cls(
            model=model,
            config=config,
            parameters=parameters,
            block=block,
            head=model.vocab_size * model.n_embd,
            rest=parameters - model.n_layer * block,
            shards=shards,
            adam_shards=world_size if shards_optimizer(config, world_size) else shards,
            stored=BYTES[config.param_dtype],
            compute=BYTES[config.dtype],
            reduce=BYTES[config.reduce_dtype],
            processes=world_size,
            tokens=config.micro_batch * config.block_size,
        )

    @property
    def low_blocks(self) -> range:
        """The blocks in low precision."""
        if self.config.low_precision == "none":
            return range(0)
        return range(
            self.config.low_precision_skip_first, self.model.n_layer - self.config.low_precision_skip_last
        )

    @property
    def low_head(self) -> bool:
        return self.config.low_precision != "none" and self.config.low_precision_scope == "layers_and_head"

    @property
    def emulated(self) -> bool:
        """Whether operands in low precision are bf16 (ops/emulation.py), not fp8."""
        return self.config.low_precision in EMULATED

    @property
    def both_forms(self) -> int:
        """Bytes of an element of an activation or a gradient that is quantized for both of its matmuls."""
        return 2 * (self.compute if self.emulated else 1)


def block_weights(model: ModelConfig) -> int:
    """Elements of one block's matrices: qkv, out, up (gate and up, if gated) and down."""
    attention = 2 * model.n_embd * (model.attention_width + model.n_kv_head * model.head_dim)
    return attention + (3 if model.ffn_type == "swiglu" else 2) * model.n_embd * model.d_ff
