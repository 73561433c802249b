"""The Triton kernels of emulated MXFP8 and NVFP4: bf16 matrices whose numbers are those of the format.

Operands of a matmul have blocks along the dimension that it sums, so a matrix that two matmuls use is
quantized along its rows and along its columns. One kernel reads it once and writes both, in the layout that
it has: bf16 matmuls take any. They give the bits of ops/emulation.py's plain forms.

A program has the rows of one block, each as a tensor of its own: what lies along a column, its amax, its
Hadamard transform and its random bits, needs no other thread. Formats are made by exact arithmetic
(float_bits.py); divisions are tl.div_rn, since `/` is approximate.

M rows · N columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.quantization.hadamard import NEGATIVE_ROWS
from ops.triton_kernels.float_bits import (
    EXPONENT,
    MANTISSA,
    as_bits,
    as_float,
    magnitude_bits,
    nearest,
    nearest_e4m3,
    with_sign_of,
)

TILE_N, NUM_WARPS = 512, 4
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
NEGATIVE = tl.constexpr(NEGATIVE_ROWS)
FP4_BLOCK, MX_BLOCK = tl.constexpr(16), tl.constexpr(32)


# --- numbers ---


@triton.jit
def _nearest_e2m1(magnitude):
    return nearest(magnitude, 1, 0)


@triton.jit
def _e2m1_step(magnitude, FACTOR: tl.constexpr):
    """The distance from one E2M1 number to the next, times FACTOR."""
    return tl.where(magnitude < 2.0, 0.5 * FACTOR, tl.where(magnitude < 4.0, FACTOR, 2.0 * FACTOR))


@triton.jit
def _stochastic_e2m1(magnitude, random):
    """random: 0 to 255, int32. magnitude: at most 6."""
    moved = magnitude + random.to(tl.float32) * _e2m1_step(magnitude, 0.00390625)
    inverse_step = tl.where(moved < 2.0, 2.0, tl.where(moved < 4.0, 1.0, 0.5))
    return tl.minimum(tl.floor(moved * inverse_step) * _e2m1_step(moved, 1.0), 6.0)


@triton.jit
def _along_row(magnitudes, TILE_N: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of each BLOCK numbers of a row -> (TILE_N / BLOCK, 1)."""
    return tl.max(magnitudes.reshape(TILE_N // BLOCK, BLOCK), 1)[:, None]


@triton.jit
def _to_row(scales, TILE_N: tl.constexpr, BLOCK: tl.constexpr):
    """(TILE_N / BLOCK, 1) -> (TILE_N): to every number the scale of its block."""
    return tl.broadcast_to(scales, TILE_N // BLOCK, BLOCK).reshape(TILE_N)


# --- rows of a block ---
# mypy takes the length of a tuple for its type: Triton unrolls the loops in which these grow.


@triton.jit
def _columns_of_tile(N, TILE_N: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    return n, n < N


@triton.jit
def _load_rows(x, n, inside, N, BLOCK: tl.constexpr):
    """The BLOCK rows of this program, each (TILE_N), fp32."""
    first = x + tl.program_id(1).to(tl.int64) * BLOCK * N + n
    rows = ()
    for row in tl.static_range(BLOCK):
        rows = rows + (tl.load(first + row * N, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return rows


@triton.jit
def _largest(rows, BLOCK: tl.constexpr):
    """The largest magnitude of each column, as integers (TILE_N)."""
    largest = magnitude_bits(rows[0])
    for row in tl.static_range(1, BLOCK):
        largest = tl.maximum(largest, magnitude_bits(rows[row]))
    return largest


@triton.jit
def _hadamard(rows):
    """The transform of each column's 16 numbers, rounded to bf16 (ops/quantization/hadamard.py)."""
    tile = ()
    for row in tl.static_range(16):
        tile = tile + (rows[row] * (-0.25 if (NEGATIVE >> row) & 1 else 0.25),)  # type: ignore[assignment]
    for stage in tl.static_range(4):
        summed = ()
        for row in tl.static_range(16):
            if (row >> stage) & 1:
                summed = summed + (tile[row - (1 << stage)] - tile[row],)  # type: ignore[assignment]
            else:
                summed = summed + (tile[row] + tile[row + (1 << stage)],)  # type: ignore[assignment]
        tile = summed
    rounded = ()
    for row in tl.static_range(16):
        rounded = rounded + (tile[row].to(tl.bfloat16).to(tl.float32),)  # type: ignore[assignment]
    return rounded


# --- MXFP8 ---


@triton.jit
def _mx_scales(magnitude):
    """amax, as integers -> what a block is multiplied by, and what its E4M3 numbers are."""
    t = as_bits(as_float(magnitude) * 0.002232142857142857)
    exponent, mantissa = t >> 23, t & MANTISSA
    up = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    code = tl.minimum(exponent + up.to(tl.int32), 254)
    scale = as_float(tl.where(code == 0, 0x400000, code << 23))  # 2^-127 is subnormal
    inverse = tl.where(code == 254, 0x400000, (254 - code) << 23)
    inverse = as_float(tl.where(code == 0, 0x3F800000, inverse))
    is_nan = magnitude > EXPONENT
    return tl.where(is_nan, float("nan"), inverse), tl.where(is_nan, float("nan"), scale)


@triton.jit
def _mx_values(x, inverse, scale):
    return (with_sign_of(nearest_e4m3(tl.abs(x * inverse)), x) * scale).to(tl.bfloat16)


@triton.jit
def _mxfp8(x, by_rows, by_columns, N, TILE_N: tl.constexpr):
    n, inside = _columns_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, MX_BLOCK)
    column_inverse, column_scale = _mx_scales(_largest(rows, MX_BLOCK))
    first = tl.program_id(1).to(tl.int64) * MX_BLOCK * N + n
    for row in tl.static_range(MX_BLOCK):
        inverse, scale = _mx_scales(_along_row(magnitude_bits(rows[row]), TILE_N, MX_BLOCK))
        inverse, scale = _to_row(inverse, TILE_N, MX_BLOCK), _to_row(scale, TILE_N, MX_BLOCK)
        tl.store(by_rows + first + row * N, _mx_values(rows[row], inverse, scale), mask=inside)
        values = _mx_values(rows[row], column_inverse, column_scale)
        tl.store(by_columns + first + row * N, values, mask=inside)


# --- NVFP4 ---


@triton.jit
def _fp4_globals(amax):
    """A -> the global encode scale g, and the global factor."""
    g = tl.minimum(tl.div_rn(2688.0, amax), FP32_MAX)
    g = tl.where((amax == 0) | (g == 0), 1.0, g)
    return tl.where(amax != amax, float("nan"), g), tl.div_rn(amax, 2688.0)


@triton.jit
def _fp4_scales(magnitude, g):
    """amax of blocks, as integers -> the blocks' scales, E4M3 in fp32, and what they are multiplied by."""
    scaled = as_float(magnitude) * (g * 0.16666666666666666)
    scale = tl.where(scaled != scaled, float("nan"), nearest_e4m3(scaled))
    return scale, tl.minimum(tl.div_rn(1.0, scale * tl.div_rn(1.0, g)), FP32_MAX)


@triton.jit
def _fp4_values(x, scale, encode, factor, random, STOCHASTIC: tl.constexpr):
    magnitude = tl.minimum(tl.abs(x * encode), 6.0)
    rounded = _stochastic_e2m1(magnitude, random) if STOCHASTIC else _nearest_e2m1(magnitude)
    return (with_sign_of(rounded, x) * scale * factor).to(tl.bfloat16)


@triton.jit
def _random_words(key, stream: tl.constexpr, n, N):
    """For each column, four words of random bits: a byte for each of the program's 16 rows."""
    group = tl.program_id(1).to(tl.int64) * N + n
    tensor = (tl.load(key + 3) + (stream << 30)).to(tl.uint32)
    zero = group.to(tl.uint32) * 0
    micro_step, iteration = tl.load(key + 2).to(tl.uint32), tl.load(key + 1).to(tl.uint32)
    return tl.philox(tl.load(key), group.to(tl.uint32), zero + tensor, zero + micro_step, zero + iteration)


@triton.jit
def _random_byte(words, row: tl.constexpr):
    return ((words[row // 4] >> (8 * (row % 4))) & 255).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["amaxes", "key"])
def _nvfp4(
    x, amaxes, key, by_rows, by_columns, N, STOCHASTIC: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    n, inside = _columns_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, FP4_BLOCK)
    first = tl.program_id(1).to(tl.int64) * FP4_BLOCK * N + n
    words = _random_words(key, 0, n, N) if STOCHASTIC else (n, n, n, n)
    g, factor = _fp4_globals(tl.load(amaxes))
    for row in tl.static_range(FP4_BLOCK):
        scale, encode = _fp4_scales(_along_row(magnitude_bits(rows[row]), TILE_N, FP4_BLOCK), g)
        scale, encode = _to_row(scale, TILE_N, FP4_BLOCK), _to_row(encode, TILE_N, FP4_BLOCK)
        values = _fp4_values(rows[row], scale, encode, factor, _random_byte(words, row), STOCHASTIC)
        tl.store(by_rows + first + row * N, values, mask=inside)
    words = _random_words(key, 1, n, N) if STOCHASTIC else (n, n, n, n)
    transformed = _hadamard(rows)
    g, factor = _fp4_globals(tl.load(amaxes + 1))
    scale, encode = _fp4_scales(_largest(transformed, FP4_BLOCK), g)
    for row in tl.static_range(FP4_BLOCK):
        values = _fp4_values(transformed[row], scale, encode, factor, _random_byte(words, row), STOCHASTIC)
        tl.store(by_columns + first + row * N, values, mask=inside)


# the amax may be one of many in a tensor
@triton.jit(do_not_specialize_on_alignment=["amax"])
def _nvfp4_square(x, amax, out, N, TILE_N: tl.constexpr):
    n, inside = _columns_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, FP4_BLOCK)
    g, factor = _fp4_globals(tl.load(amax))
    scale, encode = _fp4_scales(_along_row(_largest(rows, FP4_BLOCK), TILE_N, FP4_BLOCK), g)
    scale, encode = _to_row(scale, TILE_N, FP4_BLOCK), _to_row(encode, TILE_N, FP4_BLOCK)
    first = out + tl.program_id(1).to(tl.int64) * FP4_BLOCK * N + n
    for row in tl.static_range(FP4_BLOCK):
        values = _fp4_values(rows[row], scale, encode, factor, 0, False)
        tl.store(first + row * N, values, mask=inside)


@triton.jit
def _nvfp4_amaxes(x, parts, N, TILE_N: tl.constexpr):
    n, inside = _columns_of_tile(N, TILE_N)
    rows = _load_rows(x, n, inside, N, FP4_BLOCK)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    tl.store(parts + program, as_float(tl.max(_largest(rows, FP4_BLOCK), 0)))
    tl.store(parts + programs + program, as_float(tl.max(_largest(_hadamard(rows), FP4_BLOCK), 0)))


# --- starting them ---


def triton_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous -> its numbers in MXFP8, bf16: in blocks along rows, and along columns."""
    by_rows, by_columns = torch.empty_like(x), torch.empty_like(x)
    _mxfp8[_grid(x, MX_BLOCK.value)](x, by_rows, by_columns, x.shape[1], **_launch())
    return by_rows, by_columns


def triton_nvfp4(
    x: torch.Tensor, amaxes: torch.Tensor, key: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous, and its amaxes (2), fp32, before and after the transform -> its numbers in
    NVFP4, bf16: in blocks along rows, and, transformed, along columns. With a key, rounded stochastically."""
    by_rows, by_columns = torch.empty_like(x), torch.empty_like(x)
    _nvfp4[_grid(x, FP4_BLOCK.value)](
        x, amaxes, key, by_rows, by_columns, x.shape[1], STOCHASTIC=key is not None, **_launch()
    )
    return by_rows, by_columns


def triton_nvfp4_square(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16, contiguous, and its amax, fp32 -> its numbers in NVFP4 in blocks of 16 x 16, bf16."""
    out = torch.empty_like(x)
    _nvfp4_square[_grid(x, FP4_BLOCK.value)](x, amax, out, x.shape[1], **_launch())
    return out


def triton_nvfp4_amaxes(x: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16, contiguous -> fp32 (2): its amax, and that of its transformed columns."""
    grid = _grid(x, FP4_BLOCK.value)
    parts = torch.empty(2, grid[0] * grid[1], dtype=torch.float32, device=x.device)
    _nvfp4_amaxes[grid](x, parts, x.shape[1], **_launch())
    return parts.amax(1)


def _grid(x: torch.Tensor, block: int) -> tuple[int, int]:
    """Neighboring programs have neighboring columns."""
    return triton.cdiv(x.shape[1], TILE_N), x.shape[0] // block


def _launch() -> dict:
    return {"TILE_N": TILE_N, "num_warps": NUM_WARPS}
