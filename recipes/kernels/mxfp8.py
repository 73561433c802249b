"""The Triton kernel of emulated MXFP8: bf16 matrices whose numbers are those of the format.

Operands of a matmul have blocks along the dimension that it sums, so a matrix that two matmuls use is
quantized along its rows and along its columns. One kernel reads it once and writes both, in the layout that
it has: bf16 matmuls take any. It gives the bits of recipes/mxfp8.py's plain form.

A program has the rows of one block, each as a tensor of its own: what lies along a column, and its amax,
needs no other thread. A row is read and written as words (words.py). Formats are made by exact arithmetic
(float_bits.py, arithmetic.py).

M rows · N columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from recipes.kernels.arithmetic import larger_words, mx_words
from recipes.kernels.float_bits import (
    ABOVE_1_75,
    EXPONENT,
    EXPONENT_AND_SIGN,
    SECOND,
    as_bits,
    as_float,
)
from recipes.kernels.words import MAGNITUDES, along_row, as_words, empty_words, to_row

# A thread has 4 columns: 8 need more registers than there are.
TILE_N, WARPS = 512, 4
BLOCK = tl.constexpr(32)


@triton.jit
def _words(first, second):
    """fp32 numbers that bf16 holds, as words."""
    return (as_bits(second) & SECOND) | ((as_bits(first) >> 16) & 0xFFFF)


# mypy takes the length of a tuple for its type: Triton unrolls the loop in which this one grows.
@triton.jit
def _load_rows(x, n, inside, N, BLOCK: tl.constexpr):
    """The BLOCK rows of this program, each (TILE_N / 2) words."""
    first = x + tl.program_id(1).to(tl.int64) * BLOCK * N + n
    rows = ()
    for row in tl.static_range(BLOCK):
        rows = rows + (tl.load(first + row * N, mask=inside, other=0),)  # type: ignore[assignment]
    return rows


@triton.jit
def _scales(magnitude):
    """amax, as integers -> what a block is multiplied by, and what its E4M3 numbers are, powers of two.

    448 is 1.75 * 2^8: the exponent of amax / 448 is 8 less, and one more is the next power of two above 1.75.
    A block whose power is 2^-127 or less becomes 0. One with inf has the largest power."""
    scale = as_float(tl.maximum((magnitude + (ABOVE_1_75 - (8 << 23))) & EXPONENT_AND_SIGN, 0))
    special = tl.minimum(as_float(magnitude), 2.0**127, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.where(magnitude < EXPONENT, scale, special)
    return as_float(tl.maximum((254 << 23) - as_bits(scale), 0x400000)), scale  # 2^-127 is subnormal


@triton.jit
def _mxfp8(x, by_rows, by_columns, N, TILE_N: tl.constexpr):
    """N: the words of a row."""
    n = tl.program_id(0).to(tl.int64) * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
    inside = n < N
    rows = _load_rows(x, n, inside, N, BLOCK)
    largest = rows[0] & MAGNITUDES
    for row in tl.static_range(1, BLOCK):
        largest = larger_words(largest, rows[row] & MAGNITUDES)
    first_inverse, first_scale = _scales(largest << 16)
    second_inverse, second_scale = _scales(largest & SECOND)
    column_inverse, column_scale = _words(first_inverse, second_inverse), _words(first_scale, second_scale)
    at = tl.program_id(1).to(tl.int64) * BLOCK * N + n
    for row in tl.static_range(BLOCK):
        # As an integer, a word has the order of its second number; the first one is cut off at the end.
        words = rows[row] & MAGNITUDES
        magnitude = along_row(tl.maximum(words, words << 16), TILE_N // 2, BLOCK) & SECOND
        inverse, scale = _scales(magnitude)
        inverse, scale = _words(inverse, inverse), _words(scale, scale)
        inverse, scale = to_row(inverse, TILE_N // 2, BLOCK), to_row(scale, TILE_N // 2, BLOCK)
        tl.store(by_rows + at + row * N, mx_words(rows[row], inverse, scale), mask=inside)
        values = mx_words(rows[row], column_inverse, column_scale)
        tl.store(by_columns + at + row * N, values, mask=inside)


def triton_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous -> its numbers in MXFP8, bf16: in blocks along rows, and along columns."""
    x = as_words(x)
    by_rows, by_columns = empty_words(x), empty_words(x)
    M, words = x.shape
    grid = triton.cdiv(2 * words, TILE_N), M // BLOCK.value  # neighboring programs have neighboring columns
    _mxfp8[grid](x, by_rows, by_columns, words, TILE_N=TILE_N, num_warps=WARPS)
    return by_rows.view(torch.bfloat16), by_columns.view(torch.bfloat16)
