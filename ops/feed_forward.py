"""The feed-forward layer, down(activation(up(x))), in one function where that saves passes over memory.

M tokens · C model width · F feed-forward width
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ops.activation import Activation, Delta
from ops.linear import Linear
from ops.quantized_linear import Kept, Quantized, QuantizedLinear, matmul, matmul_backward
from ops.swiglu import swiglu, swiglu_with_amax


def feed_forward(
    x: Activation, up: Linear, activation: Callable[[torch.Tensor], torch.Tensor], down: Linear
) -> Delta:
    """x (..., C) -> (..., C). In fp8 with one scale a matrix, SwiGLU is part of the function."""
    fused = activation is swiglu and all(_has_one_scale(layer) and layer.bias is None for layer in (up, down))
    if not fused:
        return down.delta(activation(up(x)))
    layers = up.weight, up.low_precision, down.weight, down.low_precision
    if x.value.is_cuda:
        return Float8SwiGLU.apply(x.value, x.amax, *layers, True)
    return Float8SwiGLU.apply(x.value, x.amax, *layers, False), None


def _has_one_scale(layer: Linear) -> bool:
    return isinstance(layer, QuantizedLinear) and layer.one_scale


class Float8SwiGLU(torch.autograd.Function):
    """x (..., C) -> (..., C); if tells_amax, with a gradient_amax (ops/activation.py). One function, so that
    the amax of SwiGLU's result, and its gradient in fp8, reach the matmul that needs them."""

    @staticmethod
    def forward(ctx, x, amax, up, up_low: Quantized, down, down_low: Quantized, tells_amax: bool):
        gate_up, up_kept = matmul(x.flatten(0, -2), amax, up_low)  # (M, 2F)
        h, h_amax = swiglu_with_amax(gate_up)
        y, down_kept = matmul(h, h_amax, down_low)
        ctx.save_for_backward(gate_up, *up_kept, *down_kept)
        ctx.up, ctx.down = up_low, down_low
        y = y.unflatten(0, x.shape[:-1])
        return (y, y.new_empty((), dtype=torch.float32)) if tells_amax else y

    @staticmethod
    def backward(ctx, dy, dy_amax=None):
        gate_up, *kept = ctx.saved_tensors
        up_kept, down_kept = Kept(*kept[:4]), Kept(*kept[4:])
        operand = ctx.down.kind.quantize_gradient(dy.flatten(0, -2), dy_amax, ctx.down)
        dh, ddown = matmul_backward(operand, down_kept, ctx.down, dy.dtype)
        operand = ctx.up.kind.swiglu_gradient(gate_up, dh, ctx.up)
        dx, dup = matmul_backward(operand, up_kept, ctx.up, dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), None, dup, None, ddown, None, None
