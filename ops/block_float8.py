"""fp8 with a scale for each block of 128 numbers: operands and matmuls of the recipe fp8_blockwise.

What it computes
    ops/quantization/blockwise.py, with scales that are powers of two: activations and gradients in blocks of
    128 along the dimension that a matmul sums, weights in blocks of 128 x 128. All three matmuls of a Linear:

        y  = x w^T     x along its columns         w in squares
        dx = dy w      dy along its columns        w in squares, transposed
        dw = dy^T x    dy along its rows           x along its rows

    "Along its rows" is a quantization of its own, not a transpose: x and dy are quantized twice, by one
    kernel that reads them once. A weight is quantized once, and its two forms have the same numbers.
Native
    cuBLASLt multiplies such operands on Hopper alone (compute capability 9.0, CUDA 12.9 or later), E4M3 both.
    It wants the summed dimension contiguous, so operands exist as they are and transposed. It wants the
    scales of a (M, K) and of b transposed (N, K), whose product sums over K, as

        1 x 128      (M, K / 128), strides (1, M); of b (N, K / 128), strides (1, N)
        128 x 128    of b (L, N / 128), strides (1, L), where L is K / 128 rounded up to a multiple of 4

    Trap: without rounding up to 4, torch before November 2025 (pull request 166752) computed wrong numbers
    and said nothing. compare_with_emulation finds that, and wrong numbers of the kernels.
Emulated
    bf16 holds values * inverse scales exactly, since scales are powers of two (numbers below 2^-126 aside).
    So a bf16 matmul of such operands is the same up to the order of sums, on any GPU and on a CPU.

    M tokens · K, N widths
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from ops.quantization import blockwise
from ops.quantization.blocks import number_of_blocks
from ops.quantization.blockwise import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from ops.quantization.formats import E4M3

BLOCK = 128
SCALES_MULTIPLE = 4  # cuBLASLt loads so many scales of squares at once
TOLERANCE = 1e-2  # of native products: what their tensor cores' partial sums may lose


class BlockFloat8(NamedTuple):
    """A matrix (M, N) in fp8 with one scale a block, and its transpose, whose blocks are its own unless they
    are squares. Scales are laid out as cuBLASLt wants them."""

    values: torch.Tensor  # (M, N)
    inverse_scales: torch.Tensor  # of 1 x 128: (M, N / 128); of squares: (N / 128 rounded up, M / 128); fp32
    transposed: torch.Tensor  # (N, M), contiguous
    transposed_inverse_scales: torch.Tensor  # (N, M / 128), or (M / 128 rounded up, N / 128)


# --- operands ---


def block_operand(x: torch.Tensor) -> BlockFloat8:
    """x (M, N), bf16, in blocks of 1 x 128, and its transpose in blocks of its own.
    ValueError: x is not bf16, or 128 does not divide M and N."""
    return BlockFloat8(*_block_operand(x))


@custom_op("nanomfu::block_operand", mutates_args=())
def _block_operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_operand(x)
    scales, transposed_scales = _empty_scales(x)
    if x.is_cuda:
        from ops.triton_kernels.block_float8 import triton_block_operand

        values, transposed = triton_block_operand(x.contiguous(), scales, transposed_scales)
    else:
        values, found, _ = blockwise.quantize(x)
        transposed, found_transposed, _ = blockwise.quantize(x.t().contiguous())
        scales.copy_(found.t())
        transposed_scales.copy_(found_transposed.t())
    return values, scales.t(), transposed, transposed_scales.t()


@_block_operand.register_fake
def _(x):
    check_operand(x)
    (M, N), (scales, transposed_scales) = x.shape, _empty_scales(x)
    values, transposed = x.new_empty(M, N, dtype=E4M3), x.new_empty(N, M, dtype=E4M3)
    return values, scales.t(), transposed, transposed_scales.t()


def _empty_scales(x: torch.Tensor) -> list[torch.Tensor]:
    """Of x (M, N) and of its transpose, as they lie in memory: (N / 128, M) and (M / 128, N)."""
    M, N = x.shape
    return [x.new_empty(shape, dtype=torch.float32) for shape in ((N // BLOCK, M), (M // BLOCK, N))]


def check_operand(x: torch.Tensor) -> None:
    """ValueError: x is not bf16, or 128 does not divide its sides."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"operands of fp8_blockwise are made of bf16, not {x.dtype}; cast the matrix first")
    number_of_blocks(x, SQUARE)


# --- weights ---


def empty_block_weight(matrix: torch.Tensor) -> BlockFloat8:
    """Room for a weight (N, K) in blocks of 128 x 128; write_block_weights fills it.
    ValueError: 128 does not divide N and K."""
    rows, columns = number_of_blocks(matrix, SQUARE)
    values = torch.empty_like(matrix, dtype=E4M3)
    transposed = torch.empty_like(matrix.t(), dtype=E4M3, memory_format=torch.contiguous_format)
    scales, transposed_scales = (
        torch.zeros(across, along + -along % SCALES_MULTIPLE, dtype=torch.float32, device=matrix.device).t()
        for across, along in ((rows, columns), (columns, rows))
    )
    return BlockFloat8(values, scales, transposed, transposed_scales)


def write_block_weights(matrices: Sequence[torch.Tensor], into: Sequence[BlockFloat8]) -> None:
    """Writes matrices, rounded to bf16, in blocks of 128 x 128 into the tensors of `into`, whose addresses
    stay: captured code has them."""
    for matrix, written in zip(matrices, into, strict=True):
        w = matrix.to(torch.bfloat16)
        if w.is_cuda:
            from ops.triton_kernels.block_float8 import triton_block_weight

            values, scales, transposed, transposed_scales = written
            triton_block_weight(w.contiguous(), values, scales.t(), transposed, transposed_scales.t())
            continue
        values, scales, _ = blockwise.quantize(w, SQUARE)
        written.values.copy_(values)
        written.transposed.copy_(values.t())
        written.inverse_scales[: scales.shape[1]].copy_(scales.t())
        written.transposed_inverse_scales[: scales.shape[0]].copy_(scales)


def block_weight(matrix: torch.Tensor) -> BlockFloat8:
    """matrix (N, K), rounded to bf16, in blocks of 128 x 128. ValueError: 128 does not divide N and K."""
    written = empty_block_weight(matrix)
    write_block_weights([matrix], [written])
    return written


# --- matmuls ---


def block_matmul(
    a: torch.Tensor,
    a_inverse: torch.Tensor,
    b_transposed: torch.Tensor,
    b_inverse: torch.Tensor,
    squares: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """a (M, K), in blocks of 1 x 128, times the matrix whose transpose (N, K) is given, in squares or in
    blocks of 1 x 128 -> (M, N) in dtype, bf16 or fp32. On a GPU it is native, so compare_with_emulation
    comes first."""
    return _block_matmul(a, a_inverse, b_transposed, b_inverse, squares, dtype)


@custom_op("nanomfu::block_matmul", mutates_args=())
def _block_matmul(
    a: torch.Tensor,
    a_inverse: torch.Tensor,
    b_transposed: torch.Tensor,
    b_inverse: torch.Tensor,
    squares: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Not seen by torch.compile, whose checks of scales differ from version to version."""
    if a.is_cuda:
        recipe = F.ScalingType
        return F.scaled_mm(
            a,
            b_transposed.t(),
            scale_a=a_inverse,
            scale_recipe_a=recipe.BlockWise1x128,
            scale_b=b_inverse,
            scale_recipe_b=recipe.BlockWise128x128 if squares else recipe.BlockWise1x128,
            output_dtype=dtype,
        )
    exact = dequantized(a, a_inverse).float(), dequantized(b_transposed, b_inverse, squares).float()
    return (exact[0] @ exact[1].t()).to(dtype)


@_block_matmul.register_fake
def _(a, a_inverse, b_transposed, b_inverse, squares, dtype):
    return a.new_empty(a.shape[0], b_transposed.shape[0], dtype=dtype)


@register_flop_formula(torch.ops.nanomfu.block_matmul)
def _(a_shape, a_inverse_shape, b_shape, *args, **kwargs) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0]


@custom_op("nanomfu::add_block_weight_gradient", mutates_args=("total",))
def add_block_weight_gradient(
    dyt: torch.Tensor,
    dy_inverse: torch.Tensor,
    xt: torch.Tensor,
    x_inverse: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """total (N, K) fp32 += dy^T x, of dy^T (N, M) and x^T (K, M), both in blocks of 1 x 128."""
    total.add_(block_matmul(dyt, dy_inverse, xt, x_inverse, False, torch.float32))


@add_block_weight_gradient.register_fake
def _(dyt, dy_inverse, xt, x_inverse, total):
    return None


@register_flop_formula(torch.ops.nanomfu.add_block_weight_gradient)
def _(dyt_shape, dy_inverse_shape, xt_shape, *args, **kwargs) -> int:
    return 2 * dyt_shape[0] * dyt_shape[1] * xt_shape[0]


def dequantized(values: torch.Tensor, inverse_scales: torch.Tensor, squares: bool = False) -> torch.Tensor:
    """values (M, K) in fp8 times their inverse scales, laid out as cuBLASLt wants them -> (M, K), bf16."""
    if squares:
        inverse_scales = inverse_scales[: values.shape[1] // BLOCK].t()
    block = SQUARE if squares else ALONG_ROWS
    return blockwise.dequantize(blockwise.Blockwise(values, inverse_scales, block))


# --- emulated in bf16 ---


@custom_op("nanomfu::emulate_block_operand", mutates_args=())
def block_emulated_operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), bf16 -> (M, K) twice, bf16, with the numbers that E4M3 has in blocks of 128 along the rows,
    and along the columns. ValueError: as block_operand."""
    check_operand(x)
    if x.is_cuda:
        from ops.triton_kernels.block_float8 import triton_block_emulated_operand

        return triton_block_emulated_operand(x.contiguous())
    by_rows, by_columns = (
        blockwise.dequantize(blockwise.quantize(x, block)) for block in (ALONG_ROWS, ALONG_COLUMNS)
    )
    return by_rows, by_columns


@block_emulated_operand.register_fake
def _(x):
    check_operand(x)
    return x.new_empty(x.shape), x.new_empty(x.shape)


@custom_op("nanomfu::emulate_block_weight", mutates_args=())
def block_emulated_weight(weight: torch.Tensor) -> torch.Tensor:
    """weight (N, K), bf16 -> (N, K), bf16, with the numbers of blocks of 128 x 128: the same along rows and
    columns. ValueError: as block_operand."""
    check_operand(weight)
    if weight.is_cuda:
        from ops.triton_kernels.block_float8 import triton_block_emulated_weight

        return triton_block_emulated_weight(weight.contiguous())
    return blockwise.dequantize(blockwise.quantize(weight, SQUARE))


@block_emulated_weight.register_fake
def _(weight):
    check_operand(weight)
    return weight.new_empty(weight.shape)


# --- the comparison at the start ---


def compare_with_emulation(device: torch.device) -> str | None:
    """Why this device must not compute fp8_blockwise natively; None if it may: whether its kernels write the
    numbers of the emulation, and its three matmuls the products of those. Sync point."""
    try:
        for tokens, width, columns in ((384, 256, 640), (512, 512, 256)):  # see SCALES_MULTIPLE
            reason = _compare(device, tokens, width, columns)
            if reason:
                return reason
    except Exception as error:  # whatever fails here would fail in training
        return f"fp8_blockwise failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def _compare(device: torch.device, M: int, K: int, N: int) -> str | None:
    """With x (M, K), dy (M, N) and w (N, K)."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    x, dy, w = (
        (
            size * _block_sizes(*shape, device) * torch.randn(shape, generator=generator, device=device)
        ).bfloat16()
        for shape, size in (((M, K), 1.0), ((M, N), 1e-4), ((N, K), 0.02))
    )
    x8, dy8, w8 = block_operand(x), block_operand(dy), block_weight(w)
    (x_rows, x_columns), (dy_rows, dy_columns) = block_emulated_operand(x), block_emulated_operand(dy)
    weight = block_emulated_weight(w)
    written = {
        "a cast": (dequantized(*x8[:2]), x_rows),
        "a transposing cast": (dequantized(*x8[2:]), x_columns.t()),
        "a cast of a weight": (dequantized(*w8[:2], squares=True), weight),
        "a transposing cast of a weight": (dequantized(*w8[2:], squares=True), weight.t()),
    }
    for name, (found, expected) in written.items():
        if not torch.equal(found, expected):
            return f"{name} stores other numbers than the emulation"
    total = torch.ones(N, K, device=device)
    add_block_weight_gradient(*dy8[2:], *x8[2:], total)
    products = {
        "the forward": (block_matmul(*x8[:2], *w8[:2], True), x_rows.float() @ weight.float().t()),
        "the input's gradient": (block_matmul(*dy8[:2], *w8[2:], True), dy_rows.float() @ weight.float()),
        "the weight's gradient": (total - 1, dy_columns.float().t() @ x_columns.float()),
    }
    for name, (product, expected) in products.items():
        error = ((product.float() - expected).norm() / expected.norm()).item()
        if not error < TOLERANCE:
            return f"the matmul of {name} of {M} x {K} x {N} is {error:.1%} off the emulation"
    return None


def _block_sizes(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Sizes that differ from one block to the next, so that a scale that is taken for another one shows."""
    row, column = (torch.arange(length, device=device) // BLOCK for length in (rows, columns))
    return 4.0 ** ((row[:, None] + 3 * column[None, :]) % 5)
