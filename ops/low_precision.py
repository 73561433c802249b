"""A Linear in low precision: its three matmuls, by a method of ops/low_precision_methods.py.

Activations and gradients are quantized where they are used, weights once an iteration (refresh_weights in
ops/linear.py). Everything else is bf16 or fp32: residual stream, norms, attention, loss, sums of weight
gradients.

M tokens · K, N widths
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ops.low_precision_methods import METHODS, Kept, LowPrecision
from ops.matmul import Operand


def unpack_kept(saved: Sequence[torch.Tensor | None]) -> list[Kept]:
    """The Kept of several Linears, out of the tensors that a backward gets back in one row."""
    size = len(Kept._fields)
    parts = [saved[i : i + size] for i in range(0, len(saved), size)]
    return [Kept(*part) for part in parts]  # type: ignore[arg-type]  # scales alone may be None


def product(x: torch.Tensor, amax: torch.Tensor | None, low: LowPrecision) -> tuple[torch.Tensor, Operand]:
    """x (M, K) -> x w^T (M, N), and x as the operand that it was. An evaluation may have any M: rows of zeros
    are added. In training M is a multiple (training/optimization/low_precision.py)."""
    method, M = METHODS[low.method], len(x)
    if short := -M % method.multiple:
        x = F.pad(x, (0, 0, 0, short))
    operand = method.activation(x, amax, low)
    y = method.forward(operand, low.weight, x.dtype)
    return (y[:M] if short else y), operand


def linear_forward(
    x: torch.Tensor, amax: torch.Tensor | None, low: LowPrecision
) -> tuple[torch.Tensor, Kept]:
    """x (..., K) -> x w^T (M, N), and what the backward needs."""
    y, operand = product(x.flatten(0, -2), amax, low)
    return y, Kept(operand.columns, operand.inverse_scale, low.weight.columns, low.weight.inverse_scale)


def gradient_operand(dy: torch.Tensor, amax: torch.Tensor | None, low: LowPrecision) -> Operand:
    """dy (..., N), as linear_backward() takes it."""
    return METHODS[low.method].gradient(dy.flatten(0, -2), amax, low)


def linear_backward(
    dy: Operand, kept: Kept, low: LowPrecision, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx (M, K), and the weight's gradient (N, K) if there is no sum that it is added to."""
    method = METHODS[low.method]
    dx = method.input_gradient(dy, kept, dtype)
    if low.gradient_sum is None:
        return dx, method.weight_gradient(dy, kept, dtype)
    method.add_weight_gradient(dy, kept, low.gradient_sum)
    return dx, None


class LowPrecisionLinear(torch.autograd.Function):
    """x (..., K), its amax or None, weight (N, K) -> x weight^T (..., N), or, if hands_amax, a Delta
    (ops/norm.py)."""

    @staticmethod
    def forward(ctx, x, amax, weight, low: LowPrecision, hands_amax: bool):
        y, kept = linear_forward(x, amax, low)
        ctx.save_for_backward(*kept)
        ctx.low = low
        y = y.unflatten(0, x.shape[:-1])
        return (y, y.new_empty((), dtype=torch.float32)) if hands_amax else y

    @staticmethod
    def backward(ctx, dy, dy_amax=None):
        dy_operand = gradient_operand(dy, dy_amax, ctx.low)
        dx, dweight = linear_backward(dy_operand, Kept(*ctx.saved_tensors), ctx.low, dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), None, dweight, None, None
