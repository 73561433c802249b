"""LayerNorm and RMSNorm, and the residual sum before them in the same pass.

N tokens · C width
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops.activation import Activation, Delta
from ops.custom_op import custom_op, register_fake
from ops.ranges import ranged


class Norm(NamedTuple):
    """What a norm computes: x, less its mean if `centered`, divided by the root of its mean square, times
    weight, plus bias. Statistics are fp32."""

    weight: torch.Tensor  # (C,)
    bias: torch.Tensor | None  # (C,)
    eps: float
    centered: bool  # LayerNorm, else RMSNorm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, statistics in fp32. Zhang and Sennrich 2019."""

    centered = False
    bias: nn.Parameter | None

    def __init__(self, width: int, eps: float, bias: bool = False):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.register_parameter("bias", nn.Parameter(torch.empty(width)) if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalize(x, self.settings())

    def add(self, x: torch.Tensor, delta: Delta) -> tuple[torch.Tensor, Activation]:
        """x + delta, and the norm of that, in one pass."""
        return add_norm(x, delta, self.settings())

    def settings(self) -> Norm:
        return Norm(self.weight, self.bias, self.eps, self.centered)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias, statistics in fp32. Ba et al. 2016; bias optional."""

    centered = True


def normalize(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """x (..., C) -> (..., C)."""
    weight, bias, eps, centered = norm
    bias = None if bias is None else bias.to(x.dtype)
    if centered:
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias, eps)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@ranged("add_norm")
def add_norm(x: torch.Tensor, delta: Delta, norm: Norm) -> tuple[torch.Tensor, Activation]:
    """x (..., C) and its delta -> their sum, and the norm of that, in one pass where the Triton form runs."""
    value, gradient_amax = delta
    if not x.is_cuda:
        assert gradient_amax is None, "only the Triton form finds it"
        total = x + value
        return total, Activation(normalize(total, norm), source=(total, *norm))
    rows = x.flatten(0, -2), value.flatten(0, -2)
    total, normed, amax = AddNorm.apply(*rows, gradient_amax, *norm)
    total = total.view_as(x)
    return total, Activation(normed.view_as(x), amax, source=(total, *norm))


@custom_op("nanomfu::add_norm", mutates_args=())
def _add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum, its norm, the norm's amax (N,), and each row's mean and factor (2, N)."""
    from ops.triton_kernels.norm import triton_add_norm

    return triton_add_norm(x.contiguous(), delta.contiguous(), weight, bias, eps, centered)


@register_fake(_add_norm)
def _(x, delta, weight, bias, eps, centered):
    N, wide = x.shape[0], {"dtype": torch.float32}
    return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(N, **wide), x.new_empty(2, N, **wide)


@custom_op("nanomfu::add_norm_backward", mutates_args=())
def _add_norm_backward(
    total: torch.Tensor,
    dnormed: torch.Tensor,
    dtotal: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    centered: bool,
    bias: bool,
    amax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, which is ddelta too, the gradients of weight and, if there is one, bias (1 or 2, C), and dx's amax,
    if it is wanted."""
    from ops.triton_kernels.norm import triton_add_norm_backward

    gradients = dnormed.contiguous(), dtotal.contiguous()
    return triton_add_norm_backward(total, *gradients, weight, rows, centered, bias, amax)


@register_fake(_add_norm_backward)
def _(total, dnormed, dtotal, weight, rows, centered, bias, amax):
    dweights = weight.new_empty(1 + bias, *weight.shape, dtype=torch.float32)
    return total.new_empty(total.shape), dweights, dweights.new_empty(())


class AddNorm(torch.autograd.Function):
    """add_norm on a GPU: x and delta (N, C) -> the sum, its norm, and the norm's amax (N,)."""

    @staticmethod
    def forward(ctx, x, delta, gradient_amax, weight, bias, eps, centered):
        total, normed, amax, rows = _add_norm(x, delta, weight, bias, eps, centered)
        ctx.save_for_backward(total, weight, rows)
        ctx.mark_non_differentiable(amax)
        ctx.centered, ctx.bias, ctx.tells_amax = centered, bias is not None, gradient_amax is not None
        return total, normed, amax

    @staticmethod
    def backward(ctx, dtotal, dnormed, damax):
        total, weight, rows = ctx.saved_tensors
        settings = ctx.centered, ctx.bias, ctx.tells_amax
        dx, dweights, amax = _add_norm_backward(total, dnormed, dtotal, weight, rows, *settings)
        dweights = dweights.to(weight.dtype)
        dbias = dweights[1] if ctx.bias else None
        return dx, dx, amax if ctx.tells_amax else None, dweights[0], dbias, None, None


@custom_op("nanomfu::norm_again", mutates_args=())
def norm_again(
    total: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centered: bool
) -> torch.Tensor:
    """The norm of total (..., C), bit for bit as add_norm made it. An operation of its own, so that
    torch.compile does not find that it has this result already and keep it."""
    if total.is_cuda:
        from ops.triton_kernels.norm import triton_norm

        return triton_norm(total.contiguous().flatten(0, -2), weight, bias, eps, centered).view_as(total)
    return normalize(total, Norm(weight, bias, eps, centered))


@register_fake(norm_again)
def _(total, weight, bias, eps, centered):
    return total.new_empty(total.shape)
