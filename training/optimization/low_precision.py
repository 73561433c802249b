"""Chooses the layers that compute in low precision, checks that they can, and says what computes them.

ops/recipes/ has the recipes, capability.py says how a device computes them.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
import torch.nn as nn

from common.errors import RunError, UserError
from ops import float8
from ops.compare_casts import compare_casts
from ops.float8_linear import Float8Linear
from ops.linear import Linear
from ops.quantization.random_bits import random_key
from ops.quantized_linear import QuantizedLinear, convert, convert_layer
from ops.recipes.block_scaled import NativeMxfp8Linear, NativeNvfp4Linear
from ops.recipes.block_scaled_check import find_difference
from ops.recipes.fp8_delayed import DelayedLinear
from ops.recipes.mxfp8 import Mxfp8Linear
from ops.recipes.nvfp4 import Nvfp4Linear
from ops.recipes.properties import ALIGNMENTS, ONE_SCALE
from training.configuration.keys import TrainConfig
from training.configuration.seeds import LOW_PRECISION, stream_seed
from training.hardware.capability import CHECKED, EMULATED, NATIVE, capability, low_precision_support
from training.optimization.low_precision_state import (
    GRADIENT_DTYPES,
    DelayedScaling,
    LowPrecisionState,
    RandomBits,
)
from training.process.world import ALONE, World, gather_objects

log = logging.getLogger("nanomfu")

LINEARS: dict[str, type[QuantizedLinear]] = {
    "fp8_tensorwise": Float8Linear,
    "fp8_delayed": DelayedLinear,
    "mxfp8": Mxfp8Linear,
    "nvfp4": Nvfp4Linear,
}
BLOCK_SCALED: dict[str, type[QuantizedLinear]] = {"mxfp8": NativeMxfp8Linear, "nvfp4": NativeNvfp4Linear}
IN_BLOCK = re.compile(r"blocks\.(\d+)\.")


def use_low_precision(model: nn.Module, config: TrainConfig, world: World = ALONE) -> LowPrecisionState:
    """Gives the Linear layers that low_precision is for their recipe and their quantized weights, which
    refresh_weights fills. Embeddings and norms never have any. Raises UserError for a width or a number of
    tokens that the recipe cannot have, and RunError for a GPU on which a kernel stores wrong numbers. All
    ranks."""
    layers, kind = low_precision_layers(model, config), LINEARS.get(config.low_precision)
    if not layers or kind is None:
        return LowPrecisionState()
    _check_tokens(config)
    device = next(model.parameters()).device
    state = LowPrecisionState()
    if kind is Nvfp4Linear:  # ranks have other gradients, so they draw other bits
        state = RandomBits(len(layers), stream_seed(config.seed, LOW_PRECISION, world.rank) >> 1, device)
    elif kind is DelayedLinear:
        state = DelayedScaling(len(layers), config, device)
    for path, layer in layers.items():
        assert not layer.weight.is_meta, f"{path}: init_weights comes first"
        _check_widths(config, path, layer.weight)
    if device.type == "cuda":  # where kernels write the numbers
        of_head = (one.out_features for path, one in layers.items() if not IN_BLOCK.match(path))
        check_kernels(config.low_precision, device, next(of_head, None))
    native = {}
    if low_precision_support(config.low_precision, capability(device)) == CHECKED:
        # nvfp4's head has a gradient in bf16, so it is emulated
        native = {p: one for p, one in layers.items() if config.low_precision == "mxfp8" or IN_BLOCK.match(p)}
        state.check_failed = _check_block_scaled(native, config, world)
        state.block_scaled = state.check_failed is None
    if device.type == "cuda":  # what the comparisons took, up to 2 GB, is not the run's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    numbers = {path: i for i, path in enumerate(layers)}

    def recipe(layer: Linear, path: str) -> None:
        if path in numbers:
            cls = BLOCK_SCALED[config.low_precision] if state.block_scaled and path in native else kind
            convert_layer(layer, cls, GRADIENT_DTYPES[config.fp8_gradients], state.of_layer(numbers[path]))

    convert(model, recipe)
    return state


def _check_block_scaled(layers: dict[str, Linear], config: TrainConfig, world: World) -> str | None:
    """Why these layers must be emulated, on every rank if on one: a line says so. All ranks. Sync point."""
    kinds, device = (BLOCK_SCALED[config.low_precision], LINEARS[config.low_precision]), world.device
    tokens, key = config.micro_batch * config.block_size, random_key(config.seed, device=device)
    cases = {  # the head has a part of the tokens at a time
        (
            (layer.out_features, layer.in_features),
            tokens // (1 if IN_BLOCK.match(path) else config.logit_parts),
        )
        for path, layer in layers.items()
    }
    found = (find_difference(*kinds, *case, key) for case in sorted(cases))
    reasons = gather_objects(next(filter(None, found), None), world)
    reason = next((f"rank {rank}: {one}" for rank, one in enumerate(reasons) if one), None)
    if reason:
        log.warning(
            f"\nwarning: low_precision={config.low_precision!r} is emulated on every GPU of this run, slower "
            f"than bf16: the check at the start failed on {reason} ({capability(device).name}, torch "
            f"{torch.__version__}, CUDA {torch.version.cuda})"
        )
    return reason


def low_precision_layers(model: nn.Module, config: TrainConfig) -> dict[str, Linear]:
    """The Linear layers that compute in low precision, by their path in the model."""
    if config.low_precision == "none":
        return {}
    blocks = range(config.low_precision_skip_first, config.n_layer - config.low_precision_skip_last)
    found = {}
    for path, module in model.named_modules():
        block = IN_BLOCK.match(path)
        chosen = int(block[1]) in blocks if block else has_low_precision_head(config)
        if chosen and isinstance(module, Linear):  # outside the blocks, the head alone has one
            found[path] = module
    return found


def has_low_precision_head(config: TrainConfig) -> bool:
    return config.low_precision != "none" and config.low_precision_scope == "layers_and_head"


def _check_widths(config: TrainConfig, path: str, weight: torch.Tensor) -> None:
    multiple = ALIGNMENTS[config.low_precision]
    if any(width % multiple for width in weight.shape):
        raise UserError(
            f"low_precision={config.low_precision!r} needs matrices whose sides are multiples of "
            f"{multiple}, but {path} is {tuple(weight.shape)}; change n_embd, "
            "head_dim, d_ff or vocab_size, or set low_precision='none'"
        )


def _check_tokens(config: TrainConfig) -> None:
    """Weight gradients sum over the tokens of a micro-batch, the head's over those of a part of it."""
    tokens, chunks = config.micro_batch * config.block_size, config.logit_parts
    multiple = ALIGNMENTS[config.low_precision]
    if not has_low_precision_head(config):
        chunks = 1
    if tokens % (chunks * multiple):
        divided = f", in {chunks} loss_chunks" if chunks > 1 else ""
        raise UserError(
            f"low_precision={config.low_precision!r} needs a multiple of {multiple} tokens, "
            f"but batch_size * block_size is {tokens:,}{divided}; choose another block_size or batch_size"
        )


def check_kernels(recipe: str, device: torch.device, vocab_size: int | None) -> None:
    """Compares what a recipe's kernels write with plain arithmetic. Raises RunError. Sync point."""
    if reason := compare_casts(recipe, device, vocab_size):
        raise RunError(
            f"low_precision={recipe!r} cannot run on this GPU with torch {torch.__version__} and its "
            f"Triton: {reason}; another version of torch brings another Triton, low_precision='none' needs "
            "no such kernel"
        )


def executed_as(config: TrainConfig, device: torch.device, state: LowPrecisionState) -> str:
    """What really computes the matmuls: 'native fp8', 'native mxfp8', or 'bf16, emulates nvfp4'."""
    if low_precision_support(config.low_precision, capability(device)) == NATIVE:
        return "native fp8"
    if state.block_scaled:
        emulated = config.low_precision == "nvfp4" and has_low_precision_head(config)
        return f"native {config.low_precision}" + ", but the head: bf16" * emulated
    dtype = "fp32" if config.low_precision in ONE_SCALE else "bf16"
    why = f" (check failed: {state.check_failed})" if state.check_failed else ""
    return f"{dtype}, emulates {config.low_precision}{why}"


def low_precision_line(config: TrainConfig, executed: str | None = None) -> str:
    """'nvfp4 matmuls in layers but the last 4 blocks (bf16, emulates nvfp4)'. A dry run, which looks at no
    device, does not know what is executed."""
    text = f"{config.low_precision} matmuls in {config.low_precision_scope}"
    counts = {"first": config.low_precision_skip_first, "last": config.low_precision_skip_last}
    if skipped := " and ".join(f"{name} {count} blocks" for name, count in counts.items() if count):
        text += f" but the {skipped}"
    return text + (f" ({executed})" if executed else "")


def describe_low_precision(model: nn.Module, config: TrainConfig, state: LowPrecisionState) -> dict[str, Any]:
    """For the start-up report and the record: the recipe, what computes it, in how many layers; and for fp8,
    what adds its weight gradients to their sums. The first call on a GPU compares a small product and waits
    for it (ops/cublaslt.py)."""
    layers = low_precision_layers(model, config)
    if not layers:
        return {}
    device = next(model.parameters()).device
    executed = executed_as(config, device, state)
    native = executed.startswith("native")
    support = low_precision_support(config.low_precision, capability(device))
    found: dict[str, Any] = {
        "low_precision": {
            "recipe": config.low_precision,
            "scope": config.low_precision_scope,
            "executed": executed,
            "native": native,
            "support": support if native else EMULATED,
            "layers": len(layers),
        }
    }
    if config.low_precision in ONE_SCALE:
        sums = [layer.weight_grad for layer in layers.values() if layer.weight_grad is not None]
        found["fp8_weight_gradients"] = float8.describe_sums(sums)
    return found
