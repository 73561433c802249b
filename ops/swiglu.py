"""SwiGLU, and its backward also in fp8. Shazeer 2020.

The output of the projection up has gate and up of a column beside each other: gate 0, up 0, gate 1, up 1, ...
So a kernel that computes a few columns of it, or reads them, has both.

M tokens · F feed-forward width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops.custom_op import custom_op, register_fake
from ops.float8 import Operand, quantize, scale_of
from ops.ranges import ranged

AMAX_COLUMNS = 2048  # of a row: a kernel's program, which writes one amax


def pairs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., 2F): gate 0, up 0, gate 1, up 1, ... -> gate, up (..., F), two views."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return gate, up


@ranged("swiglu")
def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x (..., 2F), pairs of gate and up -> silu(gate) * up (..., F)."""
    if x.is_cuda:
        return SwiGLU.apply(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
    gate, up = pairs(x)
    return F.silu(gate) * up


class SwiGLU(torch.autograd.Function):
    """swiglu on a GPU, of x (M, 2F)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu_with_amax(x)[0]

    @staticmethod
    def backward(ctx, dh):
        return swiglu_backward(*ctx.saved_tensors, dh)


def _amax_parts(width: int) -> int:
    return -(-width // AMAX_COLUMNS)


@custom_op("nanomfu::swiglu", mutates_args=())
def swiglu_with_amax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """swiglu of x (M, 2F), pairs of gate and up, and its amax, one for each AMAX_COLUMNS columns of a row."""
    if x.is_cuda:
        from ops.triton_kernels.swiglu import triton_swiglu

        return triton_swiglu(x.contiguous(), AMAX_COLUMNS)
    gate, up = pairs(x.float())
    h = (F.silu(gate) * up).to(x.dtype)
    return h, h.abs().float().amax(-1, keepdim=True).repeat(1, _amax_parts(h.shape[1]))


@register_fake(swiglu_with_amax)
def _(x):
    M, width = x.shape[0], x.shape[1] // 2
    return x.new_empty(M, width), x.new_empty(M, _amax_parts(width), dtype=torch.float32)


@custom_op("nanomfu::swiglu_backward", mutates_args=())
def swiglu_backward(x: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    """The gradient of x (M, 2F), pairs as in x, for dh (M, F)."""
    if x.is_cuda:
        from ops.triton_kernels.swiglu import triton_swiglu_backward

        return triton_swiglu_backward(x.contiguous(), dh.contiguous(), AMAX_COLUMNS)
    return plain_swiglu_backward(x.float(), dh.float()).to(x.dtype)


def plain_swiglu_backward(x: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch, of fp32 tensors."""
    gate, up = pairs(x)
    sigmoid = gate.sigmoid()
    parts = (dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid)
    return torch.stack(parts, dim=-1).flatten(-2)


@register_fake(swiglu_backward)
def _(x, dh):
    return x.new_empty(x.shape)


@custom_op("nanomfu::swiglu_backward_and_product", mutates_args=())
def swiglu_backward_and_product(x: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """swiglu_backward of x (M, 2F) and dh (M, F), and swiglu(x) (M, F) again, with the forward's bits."""
    if x.is_cuda:
        from ops.triton_kernels.swiglu import triton_swiglu_backward_and_product

        return triton_swiglu_backward_and_product(x.contiguous(), dh.contiguous(), AMAX_COLUMNS)
    gate, up = pairs(x)
    activated = F.silu(gate)
    dgate = torch.ops.aten.silu_backward(dh * up, gate)  # rounded where autograd of swiglu() rounds
    return torch.stack((dgate, dh * activated), dim=-1).flatten(-2), activated * up


@register_fake(swiglu_backward_and_product)
def _(x, dh):
    return x.new_empty(x.shape), x.new_empty(dh.shape)


def swiglu_backward_float8(x: torch.Tensor, dh: torch.Tensor, dtype: torch.dtype) -> Operand:
    """swiglu_backward in fp8. On a GPU it is computed twice, first for its amax alone: that moves fewer bytes
    than a gradient in bf16 that a cast reads again, and needs no room for it."""
    if not x.is_cuda:
        return quantize(swiglu_backward(x, dh), dtype)
    scale = scale_of(_swiglu_backward_amax(x, dh).amax(), dtype)
    values, transposed = _swiglu_backward_float8(x, dh, scale, dtype)
    return Operand(values, transposed, scale.reciprocal())


@custom_op("nanomfu::swiglu_backward_amax", mutates_args=())
def _swiglu_backward_amax(x: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    """The amax of swiglu_backward: gate's and up's columns of a part share one."""
    from ops.triton_kernels.swiglu import triton_swiglu_backward_amax

    return triton_swiglu_backward_amax(x.contiguous(), dh.contiguous(), AMAX_COLUMNS)


@register_fake(_swiglu_backward_amax)
def _(x, dh):
    M, width = dh.shape
    return x.new_empty(M, _amax_parts(width), dtype=torch.float32)


@custom_op("nanomfu::swiglu_backward_float8", mutates_args=())
def _swiglu_backward_float8(
    x: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    from ops.triton_kernels.swiglu import triton_swiglu_backward_float8

    return triton_swiglu_backward_float8(x.contiguous(), dh.contiguous(), scale, dtype)


@register_fake(_swiglu_backward_float8)
def _(x, dh, scale, dtype):
    M, N = x.shape
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)
