"""Compiles a model, and makes its backward recompute activations: block by block, before a strategy wraps it.

All blocks share one compilation, so a start takes seconds, and communication fits between blocks. Compiling
the whole model would be a little faster on one GPU, but takes a minute longer to start (LOG.md).
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from model import Transformer
from ops.ranges import BLOCK, ranged
from ops.recompute import recompute
from training.configuration.keys import RECOMPUTING, TrainConfig

SELECTIVE_STRIDE = 2  # 'selective' recomputes every second block


def start_compilers(config: TrainConfig) -> None:
    """Starts Inductor's compiler processes, which need seconds to import torch. Inductor would start them
    when the first iteration asks for kernels, and compile those one by one until they are ready."""
    if config.compile and config.device == "cuda":
        from torch._inductor.async_compile import AsyncCompile  # 0.7 s, which other runs need not spend

        AsyncCompile.wakeup()


def compile_and_checkpoint(model: Transformer, config: TrainConfig) -> None:
    """Sets what the blocks' and the head's forward calls; hooks on the modules stay outside of it."""
    level = config.activation_checkpointing
    for i, block in enumerate(model.blocks):
        if level in RECOMPUTING:  # inside of what is compiled
            recompute(block, level)
        if config.compile:
            block.compute = _compiled(block.compute)
        if is_recomputed(i, level):
            block.compute = _recomputed(block.compute, keep_rng=config.dropout > 0)
    if config.compile:
        model.head.compute_normed = _compiled(model.head.compute_normed)


def is_recomputed(block: int, activation_checkpointing: str) -> bool:
    """Whether all of this block's activations are dropped after its forward and computed again for its
    backward. Chen et al. 2016."""
    stride = {"selective": SELECTIVE_STRIDE, "full": 1}.get(activation_checkpointing)
    return stride is not None and block % stride == 0


def _compiled(forward):
    return torch.compile(forward, fullgraph=True, dynamic=False)


def _recomputed(forward, keep_rng: bool):
    forward = ranged(BLOCK)(forward)

    # to its end, as recomputed_flops counts: an early stop omits the last matmul, in some forms of a block
    def run(*inputs):
        return checkpoint(
            forward, *inputs, use_reentrant=False, preserve_rng_state=keep_rng, early_stop=False
        )

    return run
