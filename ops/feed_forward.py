"""The feed-forward layer, down(activation(up(x))), in one function where that saves passes over memory.

M tokens · C model width · F feed-forward width
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ops.activation import Activation, Delta
from ops.float8_linear import Float8Linear, Kept
from ops.linear import Linear
from ops.swiglu import swiglu, swiglu_with_amax


def feed_forward(
    x: Activation, up: Linear, activation: Callable[[torch.Tensor], torch.Tensor], down: Linear
) -> Delta:
    """x (..., C) -> (..., C). In fp8 with one scale a matrix, SwiGLU is part of the function."""
    fused = activation is swiglu and isinstance(up, Float8Linear) and isinstance(down, Float8Linear)
    if not fused or up.bias is not None or down.bias is not None:
        return down.delta(activation(up(x)))
    layers = up.weight, down.weight, up, down
    if x.value.is_cuda:
        return Float8SwiGLU.apply(x.value, x.amax, *layers, True)
    return Float8SwiGLU.apply(x.value, x.amax, *layers, False), None


class Float8SwiGLU(torch.autograd.Function):
    """x (..., C) -> (..., C); if tells_amax, with a gradient_amax (ops/activation.py). One function, so that
    the amax of SwiGLU's result, and its gradient in fp8, reach the matmul that needs them. The weights are
    arguments for autograd alone: the layers multiply."""

    @staticmethod
    def forward(ctx, x, amax, up_weight, down_weight, up: Float8Linear, down: Float8Linear, tells_amax: bool):
        gate_up, up_kept = up.multiply(x.flatten(0, -2), amax)  # (M, 2F)
        h, h_amax = swiglu_with_amax(gate_up)
        y, down_kept = down.multiply(h, h_amax)
        ctx.save_for_backward(gate_up, *up_kept, *down_kept)
        ctx.up, ctx.down = up, down
        y = y.unflatten(0, x.shape[:-1])
        return (y, y.new_empty((), dtype=torch.float32)) if tells_amax else y

    @staticmethod
    def backward(ctx, dy, dy_amax=None):
        gate_up, *kept = ctx.saved_tensors
        up_kept, down_kept = Kept(*kept[:4]), Kept(*kept[4:])
        operand = ctx.down.quantize_gradient(dy.flatten(0, -2), dy_amax)
        dh, ddown = ctx.down.gradients(operand, down_kept, dy.dtype)
        operand = ctx.up.swiglu_gradient(gate_up, dh)
        dx, dup = ctx.up.gradients(operand, up_kept, dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), None, dup, ddown, None, None, None
