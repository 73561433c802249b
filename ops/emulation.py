"""Operands of matmuls whose numbers are those of MXFP8 or NVFP4, held in bf16.

bf16 holds every MXFP8 number, and every NVFP4 number but for its global factor. So an ordinary bf16 matmul of
such operands is what Blackwell's tensor cores compute, up to the order of sums, on any GPU and on a CPU. The
product with NVFP4's global factor is rounded to bf16, which changes the result of a matmul by 0.24 %; the
format itself changes it by 14.5 % (tests/unit/test_quantization_nvfp4.py has both without that rounding).

y = x w^T sums over the columns of x and w; dx = dy w over the rows of w; dw = dy^T x over the rows of
both. So each operand exists twice, in blocks along its rows and along its columns, both in the layout of the
matrix.

torch.compile does not see into these operations: it would divide approximately and keep more digits than bf16
has. On a GPU each is one kernel (ops/triton_kernels/mxfp8.py, nvfp4.py), with the same bits.

M rows · K columns
"""

from __future__ import annotations

import torch
from torch.library import custom_op

from ops.quantization import mxfp8, nvfp4
from ops.quantization.blocks import Block, number_of_blocks
from ops.quantization.hadamard import random_hadamard
from ops.quantization.random_bits import random_bits

FP4_BLOCK = 16
ROWS, COLUMNS = 0, 1  # the streams of random bits of a gradient's two forms


@custom_op("nanomfu::emulate_mxfp8", mutates_args=())
def mxfp8_operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), bf16 -> (M, K) twice: in blocks of 32 along the rows, and along the columns.
    ValueError: 32 does not divide M and K."""
    check_operand(x, mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS)
    if x.is_cuda:
        from ops.triton_kernels.mxfp8 import triton_mxfp8

        return triton_mxfp8(x.contiguous())
    by_rows, by_columns = (mxfp8.quantize(x, block) for block in (mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS))
    return mxfp8.dequantize(by_rows), mxfp8.dequantize(by_columns)


@mxfp8_operand.register_fake
def _(x):
    check_operand(x, mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS)
    return _empty_like(x), _empty_like(x)


@custom_op("nanomfu::emulate_nvfp4_amaxes", mutates_args=())
def nvfp4_amaxes(x: torch.Tensor) -> torch.Tensor:
    """x (M, K), bf16 -> fp32 (2): its amax, and that of its columns after the Hadamard transform.
    ValueError: 16 does not divide M and K."""
    check_operand(x, nvfp4.SQUARE)
    if x.is_cuda:
        from ops.triton_kernels.nvfp4 import triton_nvfp4_amaxes

        return triton_nvfp4_amaxes(x.contiguous())
    return torch.stack([form.abs().amax().float() for form in (x, random_hadamard(x, dim=0))])


@nvfp4_amaxes.register_fake
def _(x):
    check_operand(x, nvfp4.SQUARE)
    return x.new_empty(2, dtype=torch.float32)


@custom_op("nanomfu::emulate_nvfp4", mutates_args=())
def nvfp4_operand(
    x: torch.Tensor, amaxes: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), bf16 -> (M, K) twice: in blocks of 16 along the rows; and along the columns, after the
    Hadamard transform, for a product with another transformed matrix. amaxes: as nvfp4_amaxes(x) gives them,
    fp32 (2). key (random_bits.random_key): stochastic rounding, for gradients.
    ValueError: 16 does not divide M and K."""
    check_operand(x, nvfp4.SQUARE)
    if x.is_cuda:
        from ops.triton_kernels.nvfp4 import triton_nvfp4

        return triton_nvfp4(x.contiguous(), amaxes, key)
    forms = (
        (x, nvfp4.ALONG_ROWS, ROWS),
        (random_hadamard(x, dim=0), nvfp4.ALONG_COLUMNS, COLUMNS),
    )
    by_rows, by_columns = (
        nvfp4.quantize(form, block, amax, None if key is None else bits_of_operand(x, key, stream))
        for (form, block, stream), amax in zip(forms, amaxes, strict=True)
    )
    return nvfp4.dequantize(by_rows), nvfp4.dequantize(by_columns)


@nvfp4_operand.register_fake
def _(x, amaxes, key=None):
    check_operand(x, nvfp4.SQUARE)
    return _empty_like(x), _empty_like(x)


@custom_op("nanomfu::emulate_nvfp4_weight", mutates_args=())
def nvfp4_weight(weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """weight (N, K), bf16, and its amax, one fp32 number -> (N, K), in blocks of 16 x 16: the same values
    along rows and columns. ValueError: 16 does not divide N and K."""
    check_operand(weight, nvfp4.SQUARE)
    if weight.is_cuda:
        from ops.triton_kernels.nvfp4 import triton_nvfp4_square

        return triton_nvfp4_square(weight.contiguous(), amax)
    return nvfp4.dequantize(nvfp4.quantize(weight, nvfp4.SQUARE, amax))


@nvfp4_weight.register_fake
def _(weight, amax):
    check_operand(weight, nvfp4.SQUARE)
    return _empty_like(weight)


def bits_of_operand(x: torch.Tensor, key: torch.Tensor, stream: int) -> torch.Tensor:
    """Random bits for x (M, K), int32. A counter has those of 16 elements that a thread of the kernel has
    together: for the form with blocks along columns, 16 rows of a column; for the one with blocks along rows,
    2 rows of 8 columns, in the order of 2 neighbors in the first row, 2 in the second one, the next 2, .."""
    M, K = x.shape
    numbers = random_bits(M * K, key, stream=stream)
    if stream == COLUMNS:
        return numbers.view(M // FP4_BLOCK, K, FP4_BLOCK).transpose(1, 2).reshape(M, K)
    return numbers.view(M // 2, K // 2, 2, 2).transpose(1, 2).reshape(M, K)


def check_operand(x: torch.Tensor, *blocks: Block) -> None:
    """ValueError: x is not bf16, or a block does not divide it."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"emulated operands are bf16, not {x.dtype}; cast the matrix first")
    for block in blocks:
        number_of_blocks(x, block)


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, as what the kernels write."""
    return x.new_empty(x.shape)
