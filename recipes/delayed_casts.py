"""Casts to fp8 by a scale of the past, which find the amax for the next one: fp8_delayed.py says what for.

On a GPU nothing here waits for the device, which decides itself what a scale of 0 needs: the pass for the
amax is always started, and its programs end at once if there is a history.

    M tokens · N width
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ops.custom_op import custom_op, register_fake
from ops.float8 import Operand, scale_of
from ops.quantization.formats import to_float8
from ops.swiglu import AMAX_COLUMNS, swiglu_backward


def delayed_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    known_amax: torch.Tensor | None = None,
) -> Operand:
    """x (M, N) in fp8 by its scale, by its own amax if that is 0. amax becomes the larger one of itself and
    the amax of x, or nan. known_amax: a tensor whose maximum is the amax of x, from whoever made x."""
    return Operand(*_delayed_quantize(x, scale, amax, dtype, known_amax))


@custom_op("nanomfu::delayed_quantize", mutates_args=("amax",))
def _delayed_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    known_amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from recipes.kernels.delayed_float8 import triton_delayed_quantize

        return triton_delayed_quantize(x.contiguous(), scale, amax, dtype, known_amax)
    return plain_delayed_quantize(x, scale, amax, dtype, known_amax)


@register_fake(_delayed_quantize)
def _(x, scale, amax, dtype, known_amax):
    return _empty_float8(x, dtype)


def _empty_float8(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the fields of an Operand of x (M, N) look like."""
    M, N = x.shape
    inverse_scale = x.new_empty((), dtype=torch.float32)
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype), inverse_scale


def plain_delayed_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    known_amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """delayed_quantize in plain PyTorch."""
    found = (x.abs() if known_amax is None else known_amax).amax().float()
    amax.copy_(torch.maximum(amax, found))
    used = torch.where(scale == 0, scale_of(found, dtype), scale)
    values = to_float8(x.float() * used, dtype)
    return values, values.t().contiguous(), used.reciprocal()


@torch.no_grad()
def delayed_requantize(
    matrices: Sequence[torch.Tensor],
    into: Sequence[Operand],
    scales: Iterable[torch.Tensor],
    amaxes: Iterable[torch.Tensor],
) -> None:
    """Writes matrices, rounded to bf16, in fp8 by their scales, () each, into the tensors of `into`, whose
    addresses stay: captured code has them. amaxes, () each, as in delayed_quantize."""
    for matrix, written, scale, amax in zip(matrices, into, scales, amaxes, strict=True):
        w, dtype = matrix.to(torch.bfloat16), written.rows.dtype
        if w.is_cuda:
            from recipes.kernels.delayed_float8 import triton_delayed_quantize

            triton_delayed_quantize(w.contiguous(), scale, amax, dtype, None, out=written)
            continue
        for part, made in zip(written, plain_delayed_quantize(w, scale, amax, dtype, None), strict=True):
            part.copy_(made)


def delayed_swiglu_backward(
    x: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype
) -> Operand:
    """swiglu_backward in fp8 by the scale of the past, as in delayed_quantize. On a GPU it is computed once,
    or twice without a history."""
    return Operand(*_delayed_swiglu_backward(x, dh, scale, amax, dtype))


@custom_op("nanomfu::delayed_swiglu_backward", mutates_args=("amax",))
def _delayed_swiglu_backward(
    x: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from recipes.kernels.delayed_swiglu import triton_delayed_swiglu_backward

        return triton_delayed_swiglu_backward(
            x.contiguous(), dh.contiguous(), scale, amax, dtype, AMAX_COLUMNS
        )
    return plain_delayed_quantize(swiglu_backward(x, dh), scale, amax, dtype, None)


@register_fake(_delayed_swiglu_backward)
def _(x, dh, scale, amax, dtype):
    return _empty_float8(x, dtype)
