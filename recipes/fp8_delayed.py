"""low_precision='fp8_delayed': fp8 operands whose scale comes from the amaxes of earlier micro-steps.

A cast with a scale that is known reads its tensor once: no pass for the amax comes before, and the kernel
finds the amax for the next update as it casts. formats/delayed_scaling.py has the update and its source.

State
    Each tensor that is cast has two fp32 scalars, views into tensors of the whole model, whose addresses
    stay: `scale`, which the last update set, and `amax`, the largest magnitude that casts found since then,
    which the next update reads and sets to 0. It is that of the tensor as it is read, not scaled.
No history yet
    A scale of 0 says so. Then a tensor is scaled by its own amax, as in fp8_tensorwise. TransformerEngine
    starts with a scale of 1 instead, which rounds small gradients to 0 until the first updates.
inf and nan
    A cast with a scale of the past saturates inf, so that the result looks finite, as in TransformerEngine.
    The amax is inf or nan then: it makes the loss nan, so that the update is skipped. Neither enters the
    history, where inf would keep a scale as it is for as long as it is there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from ops.float8 import FORWARD
from ops.float8_linear import Float8Linear
from ops.float8_recipe import GRADIENT_DTYPES, Float8
from ops.linear import Linear
from recipes.delayed_casts import delayed_quantize, delayed_requantize, delayed_swiglu_backward
from recipes.formats.delayed_scaling import update_all


class Scaling(NamedTuple):
    """What delayed scaling knows of one tensor: () fp32 each, views into tensors of the whole model."""

    scale: torch.Tensor
    amax: torch.Tensor


class DelayedLinear(Float8Linear):
    def __init__(self, layer: Linear, gradient_dtype: torch.dtype, x: Scaling, weight: Scaling, dy: Scaling):
        super().__init__(layer, gradient_dtype)
        self.of_x, self.of_weight, self.of_dy = x, weight, dy

    def quantize_input(self, x, amax):
        return delayed_quantize(x, *self.of_x, FORWARD, amax)

    def quantize_gradient(self, dy, amax):
        return delayed_quantize(dy, *self.of_dy, self.gradient_dtype, amax)

    def swiglu_gradient(self, gate_up, dh):
        return delayed_swiglu_backward(gate_up, dh, *self.of_dy, self.gradient_dtype)

    @staticmethod
    def refresh(layers):
        scales, amaxes = zip(*(layer.of_weight for layer in layers), strict=True)
        torch._foreach_zero_(list(amaxes))  # a checkpoint may have replaced the weights that they are of
        weights, written = [layer.weight for layer in layers], [layer.quantized for layer in layers]
        delayed_requantize(weights, written, scales, amaxes)


class Delayed(Float8):
    """Scales and largest magnitudes of every layer's x, w and dy: rows 0, 1 and 2. All processes have the
    same."""

    settings = (*Float8.settings, "amax_history", "amax_algorithm")

    def __init__(self, config, layers, head, place):
        count, device = len(layers) + len(head), place.device
        self.algorithm = config.amax_algorithm
        self.scale, self.amax = (torch.zeros(3 * count, device=device) for _ in range(2))  # 0: no history yet
        self.history = torch.zeros(config.amax_history, 3 * count, device=device)
        dtypes = FORWARD, FORWARD, GRADIENT_DTYPES[config.fp8_gradients]
        largest = torch.tensor([torch.finfo(dtype).max for dtype in dtypes], device=device)
        self.mapped_to = largest.repeat_interleave(count)
        super().__init__(config, layers, head, place)

    def convert(self, layer, number, in_head):
        scales, amaxes = self.scale.view(3, -1)[:, number], self.amax.view(3, -1)[:, number]
        return DelayedLinear(layer, self.gradient_dtype, *map(Scaling, scales, amaxes))

    def before_iteration(self):
        """Forgets what an evaluation has found. Weights were quantized after the last update."""
        x, _, dy = self.amax.view(3, -1)
        x.zero_()
        dy.zero_()

    def after_micro_step(self, loss, last):
        finite = self.amax.isfinite()
        self.amax.masked_fill_(~finite, math.inf)
        if dist.is_initialized():
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
            finite = self.amax.isfinite()
        self.amax.masked_fill_(~finite, 0.0)
        update_all(self.scale, self.history, self.amax, self.mapped_to, self.algorithm)
        return torch.where(finite.all(), loss, math.nan)

    def state(self):
        return {"scale": self.scale, "history": self.history}


RECIPE = Delayed
