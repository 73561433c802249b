"""The Triton kernels of emulated MXFP8 and NVFP4: bf16 matrices whose numbers are those of the format.

Operands of a matmul have blocks along the dimension that it sums, so a matrix that two matmuls use is
quantized along its rows and along its columns. One kernel reads it once and writes both, in the layout that
it has: bf16 matmuls take any. They give the bits of ops/emulation.py's plain forms.

A program has the rows of one block, each as a tensor of its own: what lies along a column, its amax, its
Hadamard transform and its random bits, needs no other thread. A row is read and written as words: integers of
32 bits that hold two neighbors. Formats are made by exact arithmetic (float_bits.py, arithmetic.py);
divisions are tl.div_rn, since `/` is approximate.

M rows · N columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.quantization.hadamard import NEGATIVE_ROWS
from ops.triton_kernels.arithmetic import add_toward_zero, bf16_words, larger_words, mx_words
from ops.triton_kernels.float_bits import (
    ABOVE_1_75,
    EXPONENT,
    EXPONENT_AND_SIGN,
    SECOND,
    as_bits,
    as_float,
    first_of,
    larger,
    nearest,
    nearest_e4m3,
    negative,
    second_of,
)
from ops.triton_kernels.philox import random_bytes, random_words

TILE_N, WORD_BYTES = 512, 4
# A thread of mxfp8 has 4 columns, 8 need more registers than there are. One of nvfp4 has 8: so fewer threads
# compute the same scale of a block along a row.
MX_WARPS, FP4_WARPS = 4, 2
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
NEGATIVE = tl.constexpr(NEGATIVE_ROWS)
FP4_BLOCK, MX_BLOCK = tl.constexpr(16), tl.constexpr(32)
SIGNS, MAGNITUDES = tl.constexpr(-0x7FFF8000), tl.constexpr(0x7FFF7FFF)


# --- words of two numbers ---


@triton.jit
def _words(first, second):
    """fp32 numbers that bf16 holds, as words."""
    return (as_bits(second) & SECOND) | ((as_bits(first) >> 16) & 0xFFFF)


@triton.jit
def _larger(words):
    """The larger magnitude of each word's two numbers, as an integer, which orders as the number does."""
    return as_bits(larger(tl.abs(first_of(words)), tl.abs(second_of(words))))


@triton.jit
def _along_row(magnitudes, TILE_N: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of each BLOCK numbers of a row, from the larger one of each two -> (TILE_N / BLOCK, 1)."""
    return tl.max(magnitudes.reshape(TILE_N // BLOCK, BLOCK // 2), 1)[:, None]


@triton.jit
def _to_row(scales, TILE_N: tl.constexpr, BLOCK: tl.constexpr):
    """(TILE_N / BLOCK, 1) -> (TILE_N / 2): to every word the scale of its block."""
    return tl.broadcast_to(scales, TILE_N // BLOCK, BLOCK // 2).reshape(TILE_N // 2)


# --- rows of a block ---
# mypy takes the length of a tuple for its type: Triton unrolls the loops in which these grow.


@triton.jit
def _words_of_tile(N, TILE_N: tl.constexpr):
    """N: the words of a row."""
    n = tl.program_id(0).to(tl.int64) * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
    return n, n < N


@triton.jit
def _load_rows(x, n, inside, N, BLOCK: tl.constexpr):
    """The BLOCK rows of this program, each (TILE_N / 2) words."""
    first = x + tl.program_id(1).to(tl.int64) * BLOCK * N + n
    rows = ()
    for row in tl.static_range(BLOCK):
        rows = rows + (tl.load(first + row * N, mask=inside, other=0),)  # type: ignore[assignment]
    return rows


@triton.jit
def _largest(rows, BLOCK: tl.constexpr):
    """The largest magnitude of each column, fp32, from rows of fp32 numbers."""
    largest = tl.abs(rows[0])
    for row in tl.static_range(1, BLOCK):
        largest = larger(largest, tl.abs(rows[row]))
    return largest


@triton.jit
def _hadamard(tile):
    """The transform of 16 numbers (ops/quantization/hadamard.py), fp32."""
    summed = ()
    for row in tl.static_range(0, 16, 2):
        first = -0.25 if (NEGATIVE >> row) & 1 else 0.25
        second = tile[row + 1] * (-0.25 if (NEGATIVE >> (row + 1)) & 1 else 0.25)
        summed = summed + (tl.fma(tile[row], first, second), tl.fma(tile[row], first, negative(second)))  # type: ignore[assignment]
    tile = summed
    for stage in tl.static_range(1, 4):
        summed = ()
        for row in tl.static_range(16):
            if (row >> stage) & 1:
                summed = summed + (tile[row - (1 << stage)] - tile[row],)  # type: ignore[assignment]
            else:
                summed = summed + (tile[row] + tile[row + (1 << stage)],)  # type: ignore[assignment]
        tile = summed
    return tile


@triton.jit
def _numbers(rows):
    """Rows of the words' first numbers and rows of their second ones, fp32."""
    first, second = (), ()
    for row in tl.static_range(16):
        first = first + (first_of(rows[row]),)  # type: ignore[assignment]
        second = second + (second_of(rows[row]),)  # type: ignore[assignment]
    return first, second


@triton.jit
def _as_bf16(x):
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _rounded(first, second):
    """Rows of words from rows of fp32 numbers."""
    rows = ()
    for row in tl.static_range(16):
        rows = rows + (bf16_words(first[row], second[row]),)  # type: ignore[assignment]
    return rows


# --- MXFP8 ---


@triton.jit
def _mx_scales(magnitude):
    """amax, as integers -> what a block is multiplied by, and what its E4M3 numbers are, powers of two.

    448 is 1.75 * 2^8: the exponent of amax / 448 is 8 less, and one more is the next power of two above 1.75.
    A block whose power is 2^-127 or less becomes 0. One with inf has the largest power."""
    scale = as_float(tl.maximum((magnitude + (ABOVE_1_75 - (8 << 23))) & EXPONENT_AND_SIGN, 0))
    special = tl.minimum(as_float(magnitude), 2.0**127, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.where(magnitude < EXPONENT, scale, special)
    return as_float(tl.maximum((254 << 23) - as_bits(scale), 0x400000)), scale  # 2^-127 is subnormal


@triton.jit
def _mxfp8(x, by_rows, by_columns, N, TILE_N: tl.constexpr):
    n, inside = _words_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, MX_BLOCK)
    largest = rows[0] & MAGNITUDES
    for row in tl.static_range(1, MX_BLOCK):
        largest = larger_words(largest, rows[row] & MAGNITUDES)
    first_inverse, first_scale = _mx_scales(largest << 16)
    second_inverse, second_scale = _mx_scales(largest & SECOND)
    column_inverse, column_scale = _words(first_inverse, second_inverse), _words(first_scale, second_scale)
    at = tl.program_id(1).to(tl.int64) * MX_BLOCK * N + n
    for row in tl.static_range(MX_BLOCK):
        # As an integer, a word has the order of its second number; the first one is cut off at the end.
        words = rows[row] & MAGNITUDES
        magnitude = _along_row(tl.maximum(words, words << 16), TILE_N, MX_BLOCK) & SECOND
        inverse, scale = _mx_scales(magnitude)
        inverse, scale = _words(inverse, inverse), _words(scale, scale)
        inverse, scale = _to_row(inverse, TILE_N, MX_BLOCK), _to_row(scale, TILE_N, MX_BLOCK)
        tl.store(by_rows + at + row * N, mx_words(rows[row], inverse, scale), mask=inside)
        values = mx_words(rows[row], column_inverse, column_scale)
        tl.store(by_columns + at + row * N, values, mask=inside)


# --- NVFP4 ---


@triton.jit
def _fp4_globals(amax):
    """A -> the global encode scale g, and the global factor."""
    g = tl.minimum(tl.div_rn(2688.0, amax), FP32_MAX)
    g = tl.where((amax == 0) | (g == 0), 1.0, g)
    return g, tl.div_rn(amax, 2688.0)


@triton.jit
def _fp4_scales(amax, g):
    """amax of blocks, fp32 -> their scales, E4M3 in fp32, and what they are multiplied by. If A is nan, so is
    the global factor, and these may be anything."""
    scale = nearest_e4m3(amax * (g * 0.16666666666666666))
    return scale, tl.minimum(tl.div_rn(1.0, scale * tl.div_rn(1.0, g)), FP32_MAX)


@triton.jit
def _stochastic_e2m1(magnitude, random):
    """random: 0 to 255. magnitude: at most 6. The sum is rounded down to a multiple of the magnitude's own
    step. If the sum is in the next range, whose step is larger, it is less than the smaller step above the
    range's beginning, so the result is the same."""
    power = as_float(tl.maximum(as_bits(magnitude) & EXPONENT, 127 << 23))  # two steps
    moved = tl.fma(random.to(tl.float32) * (1 / 512), power, magnitude)
    return tl.fma(power, -(2.0**22), add_toward_zero(power, 2.0**22, moved))


@triton.jit
def _fp4_values(x, scale, encode, factor, random, STOCHASTIC: tl.constexpr):
    """Magnitudes, fp32."""
    magnitude = tl.minimum(tl.abs(x * encode), 6.0)
    rounded = _stochastic_e2m1(magnitude, random) if STOCHASTIC else nearest(magnitude, 1, 0)
    return rounded * scale * factor


@triton.jit
def _fp4_words(words, scales, encodes, factor, random, STOCHASTIC: tl.constexpr):
    """scales, encodes, random: for the first and for the second numbers."""
    first = _fp4_values(first_of(words), scales[0], encodes[0], factor, random[0], STOCHASTIC)
    second = _fp4_values(second_of(words), scales[1], encodes[1], factor, random[1], STOCHASTIC)
    return bf16_words(first, second) | (words & SIGNS)


@triton.jit(do_not_specialize_on_alignment=["amaxes", "key"])
def _nvfp4(x, amaxes, key, by_rows, by_columns, N, STOCHASTIC: tl.constexpr, TILE_N: tl.constexpr):
    n, inside = _words_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, FP4_BLOCK)
    at = tl.program_id(1).to(tl.int64) * FP4_BLOCK * N + n
    random = random_words(key, 0, n, N, rows[0]) if STOCHASTIC else n
    g, factor = _fp4_globals(tl.load(amaxes))
    for row in tl.static_range(FP4_BLOCK):
        scale, encode = _fp4_scales(as_float(_along_row(_larger(rows[row]), TILE_N, FP4_BLOCK)), g)
        scale, encode = _to_row(scale, TILE_N, FP4_BLOCK), _to_row(encode, TILE_N, FP4_BLOCK)
        bits = random_bytes(random, row, STOCHASTIC)
        values = _fp4_words(rows[row], (scale, scale), (encode, encode), factor, bits, STOCHASTIC)
        tl.store(by_rows + at + row * N, values, mask=inside)
    random = random_words(key, 1, n, N, rows[0]) if STOCHASTIC else n
    first, second = _numbers(rows)
    first, second = _hadamard(first), _hadamard(second)
    transformed = _rounded(first, second)
    g, factor = _fp4_globals(tl.load(amaxes + 1))
    # the largest of rounded numbers is the largest number, rounded
    first_scale, first_encode = _fp4_scales(_as_bf16(_largest(first, FP4_BLOCK)), g)
    second_scale, second_encode = _fp4_scales(_as_bf16(_largest(second, FP4_BLOCK)), g)
    scales, encodes = (first_scale, second_scale), (first_encode, second_encode)
    for row in tl.static_range(FP4_BLOCK):
        bits = random_bytes(random, row, STOCHASTIC)
        values = _fp4_words(transformed[row], scales, encodes, factor, bits, STOCHASTIC)
        tl.store(by_columns + at + row * N, values, mask=inside)


# the amax may be one of many in a tensor
@triton.jit(do_not_specialize_on_alignment=["amax"])
def _nvfp4_square(x, amax, out, N, TILE_N: tl.constexpr):
    n, inside = _words_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, FP4_BLOCK)
    g, factor = _fp4_globals(tl.load(amax))
    first, second = _numbers(rows)
    largest = as_bits(larger(_largest(first, FP4_BLOCK), _largest(second, FP4_BLOCK)))
    scale, encode = _fp4_scales(as_float(_along_row(largest, TILE_N, FP4_BLOCK)), g)
    scale, encode = _to_row(scale, TILE_N, FP4_BLOCK), _to_row(encode, TILE_N, FP4_BLOCK)
    at = out + tl.program_id(1).to(tl.int64) * FP4_BLOCK * N + n
    for row in tl.static_range(FP4_BLOCK):
        values = _fp4_words(rows[row], (scale, scale), (encode, encode), factor, (0, 0), False)
        tl.store(at + row * N, values, mask=inside)


@triton.jit
def _largest_of_all(first, second):
    magnitudes = larger(_largest(first, FP4_BLOCK), _largest(second, FP4_BLOCK))
    return as_float(tl.max(as_bits(magnitudes), 0))


@triton.jit
def _nvfp4_amaxes(x, parts, N, TILE_N: tl.constexpr):
    n, inside = _words_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, FP4_BLOCK)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    first, second = _numbers(rows)
    tl.store(parts + program, _largest_of_all(first, second))
    amax = _largest_of_all(_hadamard(first), _hadamard(second))
    tl.store(parts + programs + program, _as_bf16(amax))


# --- starting them ---


def triton_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous -> its numbers in MXFP8, bf16: in blocks along rows, and along columns."""
    x, by_rows, by_columns = _as_words(x), _empty(x), _empty(x)
    _mxfp8[_grid(x, MX_BLOCK.value)](x, by_rows, by_columns, x.shape[1], **_launch(MX_WARPS))
    return by_rows.view(torch.bfloat16), by_columns.view(torch.bfloat16)


def triton_nvfp4(
    x: torch.Tensor, amaxes: torch.Tensor, key: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous, and its amaxes (2), fp32, before and after the transform -> its numbers in
    NVFP4, bf16: in blocks along rows, and, transformed, along columns. With a key, rounded stochastically."""
    x, by_rows, by_columns = _as_words(x), _empty(x), _empty(x)
    _nvfp4[_grid(x, FP4_BLOCK.value)](
        x, amaxes, key, by_rows, by_columns, x.shape[1], STOCHASTIC=key is not None, **_launch(FP4_WARPS)
    )
    return by_rows.view(torch.bfloat16), by_columns.view(torch.bfloat16)


def triton_nvfp4_square(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16, contiguous, and its amax, fp32 -> its numbers in NVFP4 in blocks of 16 x 16, bf16."""
    x, out = _as_words(x), _empty(x)
    _nvfp4_square[_grid(x, FP4_BLOCK.value)](x, amax, out, x.shape[1], **_launch(FP4_WARPS))
    return out.view(torch.bfloat16)


def triton_nvfp4_amaxes(x: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16, contiguous -> fp32 (2): its amax, and that of its transformed columns."""
    x = _as_words(x)
    grid = _grid(x, FP4_BLOCK.value)
    parts = torch.empty(2, grid[0] * grid[1], dtype=torch.float32, device=x.device)
    _nvfp4_amaxes[grid](x, parts, x.shape[1], **_launch(FP4_WARPS))
    return parts.amax(1)


def _as_words(x: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16 -> (M, N / 2), int32. A part of a larger tensor may begin between two words."""
    return (x if x.data_ptr() % WORD_BYTES == 0 else x.clone()).view(torch.int32)


def _empty(x: torch.Tensor) -> torch.Tensor:
    """As large as x (M, N), bf16, as words."""
    return torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.int32, device=x.device)


def _grid(words: torch.Tensor, block: int) -> tuple[int, int]:
    """Neighboring programs have neighboring columns."""
    return triton.cdiv(2 * words.shape[1], TILE_N), words.shape[0] // block


def _launch(num_warps: int) -> dict:
    return {"TILE_N": TILE_N, "num_warps": num_warps}
