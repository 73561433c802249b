"""Chooses the layers that compute in low precision, checks that they can, and says what computes them.

ops/recipes/ has the recipes, capability.py says how a device computes them.
"""

from __future__ import annotations

import re

import torch
import torch.nn as nn

from common.errors import RunError, UserError
from ops import float8
from ops.compare_casts import compare_casts
from ops.float8_linear import Float8Linear
from ops.linear import Linear
from ops.quantized_linear import QuantizedLinear, convert, convert_layer
from ops.recipes.fp8_delayed import DelayedLinear
from ops.recipes.mxfp8 import Mxfp8Linear
from ops.recipes.nvfp4 import Nvfp4Linear
from ops.recipes.properties import ALIGNMENTS, ONE_SCALE
from training.configuration.keys import TrainConfig
from training.configuration.seeds import LOW_PRECISION, stream_seed
from training.hardware.capability import EMULATED, NATIVE, capability, low_precision_support
from training.optimization.low_precision_state import (
    GRADIENT_DTYPES,
    DelayedScaling,
    LowPrecisionState,
    RandomBits,
)

LINEARS: dict[str, type[QuantizedLinear]] = {
    "fp8_tensorwise": Float8Linear,
    "fp8_delayed": DelayedLinear,
    "mxfp8": Mxfp8Linear,
    "nvfp4": Nvfp4Linear,
}


def use_low_precision(model: nn.Module, config: TrainConfig, rank: int = 0) -> LowPrecisionState:
    """Gives the Linear layers that low_precision is for their recipe and their quantized weights, which
    refresh_weights fills. Embeddings and norms never have any. Raises UserError for a width or a number of
    tokens that the recipe cannot have, and RunError for a GPU on which a kernel stores wrong numbers."""
    layers, kind = low_precision_layers(model, config), LINEARS.get(config.low_precision)
    if not layers or kind is None:
        return LowPrecisionState()
    _check_tokens(config)
    device = next(model.parameters()).device
    state = LowPrecisionState()
    if kind is Nvfp4Linear:  # ranks have other gradients, so they draw other bits
        state = RandomBits(len(layers), stream_seed(config.seed, LOW_PRECISION, rank) >> 1, device)
    elif kind is DelayedLinear:
        state = DelayedScaling(len(layers), config, device)
    numbers = {path: i for i, path in enumerate(layers)}

    def recipe(layer: Linear, path: str) -> None:
        if path in numbers:
            assert not layer.weight.is_meta, f"{path}: init_weights comes first"
            _check_widths(config, path, layer.weight)
            convert_layer(layer, kind, GRADIENT_DTYPES[config.fp8_gradients], state.of_layer(numbers[path]))

    convert(model, recipe)
    if device.type == "cuda":  # where kernels write the numbers
        check_kernels(config.low_precision, device)
    return state


def low_precision_layers(model: nn.Module, config: TrainConfig) -> dict[str, Linear]:
    """The Linear layers that compute in low precision, by their path in the model."""
    if config.low_precision == "none":
        return {}
    blocks = range(config.low_precision_skip_first, config.n_layer - config.low_precision_skip_last)
    found = {}
    for path, module in model.named_modules():
        block = re.match(r"blocks\.(\d+)\.", path)
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


def check_kernels(recipe: str, device: torch.device) -> None:
    """Compares what a recipe's kernels write with plain arithmetic. Raises RunError. Sync point."""
    if reason := compare_casts(recipe, device):
        raise RunError(
            f"low_precision={recipe!r} cannot run on this GPU with torch {torch.__version__} and its "
            f"Triton: {reason}; another version of torch brings another Triton, low_precision='none' needs "
            "no such kernel"
        )


def executed_as(config: TrainConfig, device: torch.device) -> str:
    """What really computes the matmuls: 'native fp8', or 'bf16, emulates nvfp4'."""
    if low_precision_support(config.low_precision, capability(device)) == NATIVE:
        return "native fp8"
    dtype = "fp32" if config.low_precision in ONE_SCALE else "bf16"
    return f"{dtype}, emulates {config.low_precision}"


def low_precision_line(config: TrainConfig, executed: str | None = None) -> str:
    """'nvfp4 matmuls in layers but the last 4 blocks (bf16, emulates nvfp4)'. A dry run, which looks at no
    device, does not know what is executed."""
    text = f"{config.low_precision} matmuls in {config.low_precision_scope}"
    counts = {"first": config.low_precision_skip_first, "last": config.low_precision_skip_last}
    if skipped := " and ".join(f"{name} {count} blocks" for name, count in counts.items() if count):
        text += f" but the {skipped}"
    return text + (f" ({executed})" if executed else "")


def describe_low_precision(model: nn.Module, config: TrainConfig) -> dict[str, object]:
    """For the start-up report and the record: the recipe, what computes it, in how many layers; and for fp8,
    what adds its weight gradients to their sums. The first call on a GPU compares a small product and waits
    for it (ops/cublaslt.py)."""
    layers = low_precision_layers(model, config)
    if not layers:
        return {}
    device = next(model.parameters()).device
    executed = executed_as(config, device)
    native = executed.startswith("native")
    support = low_precision_support(config.low_precision, capability(device))
    found: dict[str, object] = {
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
