"""fp8_delayed: fp8 operands whose scale comes from the amaxes of earlier micro-steps.

A cast with a scale that is known reads its tensor once: no pass for the amax comes before, and the kernel
finds the amax for the next update as it casts. ops/quantization/delayed_scaling.py has the update and its
source.

State
    Each tensor that is cast has two fp32 scalars, views into tensors of the whole model, whose addresses
    stay: `scale`, which the last update set, and `amax`, the largest magnitude that casts found since then,
    which the next update reads and sets to 0. It is that of the tensor as it is read, not scaled.
No history yet
    A scale of 0 says so. Then a tensor is scaled by its own amax, as in fp8_tensorwise. TransformerEngine
    starts with a scale of 1 instead, which rounds small gradients to 0 until the first updates.
inf and nan
    A cast with a scale of the past saturates inf, so that the result looks finite, as in TransformerEngine.
    The amax is inf or nan then: a guard against overflows must look at it.

On a GPU nothing here waits for the device, which decides itself what a scale of 0 needs: the pass for the
amax is always started, and its programs end at once if there is a history.

    M tokens · N width
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ops.custom_op import custom_op, register_fake
from ops.float8 import FORWARD, scale_of
from ops.float8_linear import Float8Linear
from ops.quantization.formats import to_float8
from ops.quantized_linear import Operand
from ops.swiglu import AMAX_COLUMNS, swiglu_backward


class Scaling(NamedTuple):
    """What delayed scaling knows of one tensor: () fp32 each, views into tensors of the whole model."""

    scale: torch.Tensor
    amax: torch.Tensor


class DelayedLinear(Float8Linear):
    """Its state is the Scaling of x, of w and of dy."""

    @staticmethod
    def quantize_input(x, amax, low):
        scale, found = low.state[0]
        return delayed_quantize(x, scale, found, FORWARD, amax)

    @staticmethod
    def quantize_gradient(dy, amax, low):
        scale, found = low.state[2]
        return delayed_quantize(dy, scale, found, low.gradient_dtype, amax)

    @staticmethod
    def swiglu_gradient(gate_up, dh, low):
        scale, found = low.state[2]
        return delayed_swiglu_backward(gate_up, dh, scale, found, low.gradient_dtype)

    @staticmethod
    def requantize(weights, into):
        scales, amaxes = zip(*(low.state[1] for low in into), strict=True)
        torch._foreach_zero_(list(amaxes))  # a checkpoint may have replaced the weights that they are of
        delayed_requantize(weights, [low.weight for low in into], scales, amaxes)


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
        from ops.triton_kernels.delayed_float8 import triton_delayed_quantize

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
            from ops.triton_kernels.delayed_float8 import triton_delayed_quantize

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
        from ops.triton_kernels.swiglu import triton_delayed_swiglu_backward

        return triton_delayed_swiglu_backward(
            x.contiguous(), dh.contiguous(), scale, amax, dtype, AMAX_COLUMNS
        )
    return plain_delayed_quantize(swiglu_backward(x, dh), scale, amax, dtype, None)


@register_fake(_delayed_swiglu_backward)
def _(x, dh, scale, amax, dtype):
    return _empty_float8(x, dtype)
