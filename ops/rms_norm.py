"""RMSNorm, and the residual sum before it in the same pass.

N tokens · C width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.library import custom_op


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in fp32."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """x, delta (..., C) -> x + delta, its RMSNorm, and the amax of that (ops/float8.py): one number a token
    where the Triton form runs, else None."""
    if x.is_cuda:
        total, normed, amax = _add_rms_norm(x.flatten(0, -2), delta.flatten(0, -2), weight, eps)
        return total.view_as(x), normed.view_as(x), amax
    total = x + delta
    return total, rms_norm(total, weight, eps), None


@custom_op("nanomfu::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from ops.triton_kernels.rms_norm import triton_add_rms_norm

    return triton_add_rms_norm(x.contiguous(), delta.contiguous(), weight, eps)


@_add_rms_norm.register_fake
def _(x, delta, weight, eps):
    shape = x.shape
    return x.new_empty(shape), x.new_empty(shape), x.new_empty(shape[0], dtype=torch.float32)


@custom_op("nanomfu::add_rms_norm_backward", mutates_args=())
def _add_rms_norm_backward(
    total: torch.Tensor, dnormed: torch.Tensor, dtotal: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from ops.triton_kernels.rms_norm import triton_add_rms_norm_backward

    return triton_add_rms_norm_backward(total, dnormed.contiguous(), dtotal.contiguous(), weight, eps)


@_add_rms_norm_backward.register_fake
def _(total, dnormed, dtotal, weight, eps):
    return total.new_empty(total.shape), weight.new_empty(weight.shape, dtype=torch.float32)


def _add_rms_norm_setup(ctx, inputs, output):
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight)


def _add_rms_norm_autograd(ctx, dtotal, dnormed, damax):
    total, weight = ctx.saved_tensors
    dx, dweight = _add_rms_norm_backward(total, dnormed, dtotal, weight, ctx.eps)
    return dx, dx, dweight.to(weight.dtype), None


_add_rms_norm.register_autograd(_add_rms_norm_autograd, setup_context=_add_rms_norm_setup)
