"""Chooses the layers that compute in low precision, and keeps what they need from one micro-step to the next.

ops/recipes.py has the recipes, ops/low_precision_methods.py computes them, capability.py says how a device
does.
"""

from __future__ import annotations

import math
import re

import torch
import torch.distributed as dist
import torch.nn as nn

from common.errors import RunError, UserError
from ops import float8
from ops.compare_casts import compare_casts
from ops.float8 import FORWARD
from ops.linear import Linear
from ops.low_precision_methods import METHODS, LowPrecision, Scaling
from ops.quantization.delayed_scaling import update_all
from ops.quantization.random_bits import random_key
from ops.recipes import ALIGNMENTS, DELAYED, RANDOM
from training.configuration.keys import TrainConfig
from training.configuration.seeds import LOW_PRECISION, stream_seed
from training.hardware.capability import NATIVE, capability, low_precision_support

GRADIENT_DTYPES = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}  # by fp8_gradients


class LowPrecisionState:
    """What low precision keeps from one micro-step to the next. It is on the device, where compiled code and
    captured graphs read it, and in every checkpoint. Most recipes keep nothing."""

    def before_iteration(self) -> None:
        pass

    def before_micro_step(self) -> None:
        pass

    def after_micro_step(self, loss: torch.Tensor, last: bool) -> torch.Tensor:
        """The loss, or nan if the backward overflowed where its gradients do not show it. last: of the
        iteration."""
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """By name, for a checkpoint."""
        return {}


class RandomBits(LowPrecisionState):
    """For which iteration and micro-step stochastic rounding draws its bits, so that a resumed run draws the
    same ones."""

    def __init__(self, layers: int, seed: int, device: torch.device):
        keys = [random_key(seed, tensor=i) for i in range(layers)]
        self.keys = torch.stack(keys).to(device)  # int64 (layers, 4), of ops/quantization/random_bits.py
        self.counter = torch.zeros(2, dtype=torch.int64, device=device)  # iteration, micro-step

    def before_micro_step(self) -> None:
        self.keys[:, 1:3] = self.counter

    def after_micro_step(self, loss: torch.Tensor, last: bool) -> torch.Tensor:
        self.counter[1] += 1
        if last:
            self.counter[0] += 1
            self.counter[1].zero_()  # = 0 would wait for the GPU
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        return {"counter": self.counter}


class DelayedScaling(LowPrecisionState):
    """Scales and largest magnitudes of every layer's x, w and dy: rows 0, 1 and 2. All processes have the
    same. Source: ops/quantization/delayed_scaling.py.

    inf and nan, which fp8 would hide by saturation, make the loss nan, so that the update is skipped; they do
    not enter the history, where inf would keep a scale as it is for as long as it is there."""

    def __init__(self, layers: int, config: TrainConfig, device: torch.device):
        numbers = 3 * layers
        self.algorithm = config.amax_algorithm
        self.scale, self.amax = (torch.zeros(numbers, device=device) for _ in range(2))  # 0: no history yet
        self.history = torch.zeros(config.amax_history, numbers, device=device)
        dtypes = FORWARD, FORWARD, GRADIENT_DTYPES[config.fp8_gradients]
        largest = torch.tensor([torch.finfo(dtype).max for dtype in dtypes], device=device)
        self.mapped_to = largest.repeat_interleave(layers)

    def of_layer(self, i: int) -> tuple[Scaling, Scaling, Scaling]:
        scales, amaxes = self.scale.view(3, -1)[:, i], self.amax.view(3, -1)[:, i]
        x, w, dy = (Scaling(*pair) for pair in zip(scales, amaxes, strict=True))
        return x, w, dy

    def before_iteration(self) -> None:
        """Forgets what an evaluation has found. Weights were quantized after the last update."""
        x, _, dy = self.amax.view(3, -1)
        x.zero_()
        dy.zero_()

    def after_micro_step(self, loss: torch.Tensor, last: bool) -> torch.Tensor:
        finite = self.amax.isfinite()
        self.amax.masked_fill_(~finite, math.inf)
        if dist.is_initialized():
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
            finite = self.amax.isfinite()
        self.amax.masked_fill_(~finite, 0.0)
        update_all(self.scale, self.history, self.amax, self.mapped_to, self.algorithm)
        return torch.where(finite.all(), loss, math.nan)

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "history": self.history}


def use_low_precision(model: nn.Module, config: TrainConfig, rank: int = 0) -> LowPrecisionState:
    """Gives the Linear layers that low_precision is for their recipe and their quantized weights, which
    refresh_weights fills. Embeddings and norms never have any. Raises UserError for a width or a number of
    tokens that the recipe cannot have, and RunError for a GPU on which a kernel stores wrong numbers."""
    layers, state = low_precision_layers(model, config), LowPrecisionState()
    if not layers:
        return state
    _check_tokens(config)
    device = next(model.parameters()).device
    if config.low_precision in RANDOM:  # ranks have other gradients, so they draw other bits
        state = RandomBits(len(layers), stream_seed(config.seed, LOW_PRECISION, rank) >> 1, device)
    elif config.low_precision in DELAYED:
        state = DelayedScaling(len(layers), config, device)
    for i, (path, module) in enumerate(layers.items()):
        assert not module.weight.is_meta, f"{path}: init_weights comes first"
        _check_widths(config, path, module.weight)
        module.low_precision = LowPrecision(
            method=config.low_precision,
            gradient_dtype=GRADIENT_DTYPES[config.fp8_gradients],
            weight=METHODS[config.low_precision].empty_weight(module.weight),
            key=state.keys[i] if isinstance(state, RandomBits) else None,
            scalings=state.of_layer(i) if isinstance(state, DelayedScaling) else None,
        )
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
    dtype = "fp32" if METHODS[config.low_precision].one_scale else "bf16"
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
    found: dict[str, object] = {
        "low_precision": {
            "recipe": config.low_precision,
            "scope": config.low_precision_scope,
            "executed": executed,
            "native": executed.startswith("native"),
            "layers": len(layers),
        }
    }
    if METHODS[config.low_precision].one_scale:
        sums = [layer.weight_grad for layer in layers.values() if layer.weight_grad is not None]
        found["fp8_weight_gradients"] = float8.describe_sums(sums)
    return found
