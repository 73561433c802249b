"""fp8 matmuls with one scale per tensor, computed from the tensor itself ("tensorwise", "dynamic scaling").

Forward operands are e4m3 (3 bits of mantissa), gradients e5m2 (more range): Micikevicius et al. 2022, sec. 3.
A tensor's largest magnitude is mapped to the largest fp8 number; the matmul sums in fp32, multiplies by both
inverse scales and returns bf16. Weights are quantised once per iteration (training/optimization/precision.py), activations
and gradients where they are used. ops/triton_kernels/float8.py makes an operand and its transpose in one pass;
here is the plain form, which a CPU runs: the same fp8 values, multiplied in fp32.

    M tokens · K, N widths · F feed-forward width
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.library import custom_op

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 1e-12  # an all-zero tensor has a finite scale
ALIGNMENT = 16  # both widths of an fp8 matmul must be multiples of it


class Float8(NamedTuple):
    """A matrix in fp8: values * inverse_scale is about the matrix."""

    values: torch.Tensor  # (M, N)
    transposed: torch.Tensor  # (N, M), contiguous
    inverse_scale: torch.Tensor  # () fp32


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What maps amax to the largest number of dtype; fp32."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=SMALLEST_AMAX)).float()


def quantize(x: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor | None = None) -> Float8:
    """x (M, N) as fp8. amax: largest magnitudes of its parts, if whatever made x has them; else they are
    taken here, row by row first, so that torch.compile can do it in the kernel that makes x."""
    scale = scale_of((x.abs().amax(-1) if amax is None else amax).amax(), dtype)
    return Float8(*_cast(x, scale, dtype), scale.reciprocal())


def empty_like(matrix: torch.Tensor) -> Float8:
    """Room for a weight; requantize() fills it."""
    values = torch.empty_like(matrix, dtype=FORWARD)
    inverse_scale = torch.empty((), dtype=torch.float32, device=matrix.device)
    return Float8(values, torch.empty_like(matrix.t(), dtype=FORWARD).contiguous(), inverse_scale)


def requantize(matrix: torch.Tensor, into: Float8) -> None:
    """Writes matrix in fp8 into the tensors of `into`, whose addresses stay: captured code has them."""
    scale = scale_of(matrix.abs().amax(-1).amax(), FORWARD)
    into.inverse_scale.copy_(scale.reciprocal())
    if matrix.is_cuda:
        from ops.triton_kernels.float8 import quantize

        quantize(matrix, scale, FORWARD, out=into[:2])
        return
    into.values.copy_(_saturated(matrix.float() * scale, FORWARD))
    into.transposed.copy_(into.values.t())


def matmul(a, b_transposed, a_inverse, b_inverse, dtype=torch.bfloat16, fast=False) -> torch.Tensor:
    """a (M, K) times the matrix whose transpose (N, K) is given -> (M, N) in dtype. fast: partial sums
    in less than fp32 on Ada and Hopper, which forward results stand and gradients should not."""
    if a.is_cuda:
        return torch._scaled_mm(
            a, b_transposed.t(), a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast
        )
    return ((a.float() @ b_transposed.float().t()) * (a_inverse * b_inverse)).to(dtype)


def _saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def _both(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = _saturated(x, dtype)
    return values, values.t().contiguous()


@custom_op("nanomfu::float8_cast", mutates_args=())
def _cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    if x.is_cuda:
        from ops.triton_kernels.float8 import quantize

        return quantize(x.contiguous(), scale, dtype)
    return _both(x.float() * scale, dtype)


@_cast.register_fake
def _(x, scale, dtype):
    M, N = x.shape
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)


@custom_op("nanomfu::add_float8_weight_gradient", mutates_args=("total",))
def add_weight_gradient(
    dyt: torch.Tensor,
    xt: torch.Tensor,
    dy_inverse: torch.Tensor,
    x_inverse: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """total (N, K) fp32 += dy^T x, of dy^T (N, M) and x^T (K, M)."""
    total.add_(matmul(dyt, xt, dy_inverse, x_inverse, torch.float32))


@add_weight_gradient.register_fake
def _(dyt, xt, dy_inverse, x_inverse, total):
    return None
