"""fp8: what it computes, and the matmuls that it consists of. docs/low_precision.md says how to use it.

How it works
    A Linear is three matmuls: y = x w^T, and in the backward dx = dy w and dw = dy^T x. Each operand is
    multiplied by one scale, which maps its largest magnitude to the largest fp8 number, and is then saturated
    and rounded; the matmul sums products in fp32 and multiplies the sums by both inverse scales. Weights and
    activations are e4m3, gradients e5m2: Micikevicius et al. 2022, sec. 3. A CPU multiplies the same numbers
    in fp32.
Weights
    They change once an iteration, so refresh_weights quantizes them once, after the update,
    for all micro-steps. FSDP gathers the bf16 weights at that moment instead of in the next forward.
Layout
    torch's fp8 matmul wants the summed dimension contiguous in both operands ("TN"). y sums over the columns
    of x and w, dx over the rows of w, dw over the rows of x and dy: each matrix is needed as it is and
    transposed. An Operand holds both; together they are as large as the matrix in bf16.
amax
    A scale needs the tensor's largest magnitude (amax) before the cast, which by itself is one more pass
    over the tensor. A kernel that writes the tensor gets it for nothing: residual sum and norm, their
    backward (ops/activation.py), SwiGLU and the heads' backward also find it. SwiGLU's backward is computed
    twice, for its amax and then in fp8. An argument `amax` is a tensor of any shape whose maximum is that of
    all of x, or None if nobody knows it; then quantize() computes it. The gradient of the head's logits needs
    none: softmax - one_hot is at most 1, so its scale is fixed, and the loss writes it in e5m2 at once.
Fast accumulation
    Ada's and Hopper's fp8 tensor cores are faster if partial sums have less precision than fp32. That is
    accurate enough for the forward pass, which sums over some thousand columns. Gradients sum over more, up
    to all tokens: where the products share a sign, sums come out 8 % too small, and the loss after 300
    iterations was 0.7 % higher (LOG.md, 2026-11-22). TransformerEngine chooses the same.
Sums of weight gradients
    The matmul adds to them as it writes (ops/cublaslt.py). Where it cannot, it writes a new tensor, which
    another pass adds; describe_sums says which and why.

    M tokens · K, N widths
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ops import cublaslt
from ops.custom_op import custom_op, register_fake
from ops.quantization.formats import to_float8

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST_AMAX = 1e-12  # an all-zero tensor has a finite scale
AMAX_PART = 16384  # numbers whose amax a program of the kernel finds


class Operand(NamedTuple):
    """A matrix (M, N) for two matmuls: rows (M, N); columns, transposed, (N, M), contiguous. Either form
    times inverse_scale, () fp32, is about the matrix."""

    rows: torch.Tensor
    columns: torch.Tensor
    inverse_scale: torch.Tensor


# --- quantization ---


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What maps amax to the largest number of dtype; fp32."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=SMALLEST_AMAX)).float()


def quantize(x: torch.Tensor, dtype: torch.dtype, amax: torch.Tensor | None = None) -> Operand:
    """x (M, N) as fp8. An amax that is not given is computed, row by row first, so that torch.compile can do
    it in the kernel that makes x."""
    scale = scale_of((x.abs().amax(-1) if amax is None else amax).amax(), dtype)
    values, transposed = _cast(x, scale, dtype)
    return Operand(values, transposed, scale.reciprocal())


def empty_like(matrix: torch.Tensor) -> Operand:
    """Room for a weight; requantize() fills it."""
    values = torch.empty_like(matrix, dtype=FORWARD)
    inverse_scale = torch.empty((), dtype=torch.float32, device=matrix.device)
    return Operand(values, torch.empty_like(matrix.t(), dtype=FORWARD).contiguous(), inverse_scale)


def requantize(matrices: Sequence[torch.Tensor], into: Sequence[Operand]) -> None:
    """Writes matrices, rounded to bf16, in fp8 into the tensors of `into`, whose addresses stay: captured
    code has them."""
    if not matrices:
        return
    if matrices[0].is_cuda:
        scales = _write_by_kernels(matrices, into)
    else:
        scales = scale_of(torch.stack([_bf16(matrix).abs().amax().float() for matrix in matrices]), FORWARD)
        for matrix, scale, written in zip(matrices, scales, into, strict=True):
            written.rows.copy_(to_float8(_bf16(matrix).float() * scale, FORWARD))
            written.columns.copy_(written.rows.t())
    torch._foreach_copy_([written.inverse_scale for written in into], list(scales.reciprocal().unbind()))


def _write_by_kernels(matrices: Sequence[torch.Tensor], into: Sequence[Operand]) -> torch.Tensor:
    """Values and transposed. The scales are computed together: by themselves, they would be seven small
    kernels for each matrix."""
    from ops.triton_kernels.float8 import triton_amax, triton_quantize

    longest = max(_amax_parts(matrix) for matrix in matrices)
    parts = torch.zeros(len(matrices), longest, dtype=torch.float32, device=matrices[0].device)
    for matrix, row in zip(matrices, parts, strict=True):
        triton_amax(_bf16(matrix), row[: _amax_parts(matrix)], AMAX_PART)
    scales = scale_of(parts.amax(1), FORWARD)
    for matrix, scale, written in zip(matrices, scales, into, strict=True):
        triton_quantize(_bf16(matrix), scale, FORWARD, out=(written.rows, written.columns))
    return scales


def _bf16(matrix: torch.Tensor) -> torch.Tensor:
    """One at a time, so that copies, where there must be any, do not add up."""
    return matrix.to(torch.bfloat16)


def _amax_parts(x: torch.Tensor) -> int:
    return -(-x.numel() // AMAX_PART)


def amax_of(x: torch.Tensor) -> torch.Tensor | None:
    """The amax of what an operation wrote that torch.compile does not make, on a GPU, by a pass of its own:
    half as long as the one that torch.compile would make. Elsewhere None: quantize() computes it."""
    return _amax(x.detach()) if x.is_cuda else None


@custom_op("nanomfu::amax", mutates_args=())
def _amax(x: torch.Tensor) -> torch.Tensor:
    from ops.triton_kernels.float8 import triton_amax

    parts = x.new_empty(_amax_parts(x), dtype=torch.float32)
    triton_amax(x.contiguous(), parts, AMAX_PART)
    return parts


@register_fake(_amax)
def _(x):
    return x.new_empty(_amax_parts(x), dtype=torch.float32)


@custom_op("nanomfu::float8_cast", mutates_args=())
def _cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x times scale in fp8, and its transpose."""
    if x.is_cuda:
        from ops.triton_kernels.float8 import triton_quantize

        return triton_quantize(x.contiguous(), scale, dtype)
    values = to_float8(x.float() * scale, dtype)
    return values, values.t().contiguous()


@register_fake(_cast)
def _(x, scale, dtype):
    M, N = x.shape
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)


# --- matmuls ---


def matmul(
    a: torch.Tensor,
    b_transposed: torch.Tensor,
    a_inverse: torch.Tensor,
    b_inverse: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> torch.Tensor:
    """a (M, K) times the matrix whose transpose (N, K) is given -> (M, N) in dtype. fast: fast accumulation,
    which is accurate enough for the forward pass, not for gradients. A CPU multiplies the same numbers in
    fp32."""
    if a.is_cuda:
        return torch._scaled_mm(
            a, b_transposed.t(), a_inverse, b_inverse, out_dtype=dtype, use_fast_accum=fast
        )
    return ((a.float() @ b_transposed.float().t()) * (a_inverse * b_inverse)).to(dtype)


@custom_op("nanomfu::add_float8_weight_gradient", mutates_args=("total",))
def add_float8_weight_gradient(
    dyt: torch.Tensor,
    xt: torch.Tensor,
    dy_inverse: torch.Tensor,
    x_inverse: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """total (N, K) fp32 += dy^T x, of dy^T (N, M) and x^T (K, M)."""
    possible = why_own_pass(total, dyt, xt) is None
    if possible and cublaslt.add_product(dyt, xt, dy_inverse, x_inverse, total):
        return
    total.add_(matmul(dyt, xt, dy_inverse, x_inverse, torch.float32))


@register_fake(add_float8_weight_gradient)
def _(dyt, xt, dy_inverse, x_inverse, total):
    return None


def why_own_pass(total: torch.Tensor, *operands: torch.Tensor) -> str | None:
    """Why the matmul itself cannot add to this sum; None if it can."""
    return cublaslt.unsuited(total, *operands) or cublaslt.unavailable(total.device)


def describe_sums(totals: Iterable[torch.Tensor]) -> str:
    """What adds fp8 weight gradients to these sums, and why, in one line."""
    reasons = Counter(why_own_pass(total) for total in totals)
    ways = [f"{count} in a pass of their own ({why})" for why, count in reasons.items() if why]
    if None in reasons:
        ways.insert(0, f"{reasons[None]} by the matmul (cuBLASLt {cublaslt.version()})")
    return ", ".join(ways) or "none: autograd gets the gradients"
