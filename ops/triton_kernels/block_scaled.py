"""The Triton kernels of mxfp8 and nvfp4 on tensor cores: bf16 matrices as codes, and scales in tiles.

They give the bits of ops/recipes/block_scaled.py's plain forms. A program has a square of the matrix. It
makes the form along rows from it, and from its transpose, in the same way, the form along columns. Rounding
is exact arithmetic on fp32 numbers and their bits (float_bits.py), divisions are tl.div_rn. No number is one
of Triton's fp8: float8.py says why.

M rows · N columns of the matrix; R rows · K columns of a form, the matrix or its transpose
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.quantization.hadamard import NEGATIVE_ROWS
from ops.quantization.scale_layout import TILE_ROWS
from ops.triton_kernels.float_bits import EXPONENT, MAGNITUDE, as_bits, as_float, nearest, nearest_e4m3
from ops.triton_kernels.nvfp4 import _globals, _scales
from ops.triton_kernels.philox import load_key, random_words

SIDE, WARPS = 64, 8  # of a program's square: 16 numbers a thread, so that the code fits a cache (nvfp4.py)
NEGATIVE = tl.constexpr(NEGATIVE_ROWS)
E8M0_ONE, E8M0_INF, E8M0_NAN = tl.constexpr(127), tl.constexpr(254), tl.constexpr(255)

Forms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _load(x, m, n, M, N, SIDE: tl.constexpr):
    """The square at row m and column n, fp32; zeros beyond the matrix."""
    rows, columns = (m + tl.arange(0, SIDE))[:, None], (n + tl.arange(0, SIDE))[None, :]
    return tl.load(x + rows * N + columns, mask=(rows < M) & (columns < N), other=0).to(tl.float32)


@triton.jit
def _store(codes, scales, out, into, r, k, R, K, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """What a square at (r, k) of a form (R, K) has become: codes (SIDE, bytes), and scales (SIDE, blocks),
    which are written with the padding of the tiles (ops/quantization/scale_layout.py)."""
    BYTES: tl.constexpr = codes.shape[1]
    width = K * BYTES // SIDE
    rows, places = (r + tl.arange(0, SIDE))[:, None], (k * BYTES // SIDE + tl.arange(0, BYTES))[None, :]
    tl.store(out + rows * width + places, codes.to(tl.uint8), mask=(rows < R) & (places < width))
    columns = (k // BLOCK + tl.arange(0, SIDE // BLOCK))[None, :]
    across = tl.cdiv(K, 4 * BLOCK)
    tile = (rows // 128) * across + columns // 4
    place = tile * 512 + (rows % 32) * 16 + (rows % 128 // 32) * 4 + columns % 4
    tl.store(into + place, scales.to(tl.uint8), mask=columns < 4 * across)


@triton.jit
def _e4m3_codes(magnitude):
    """Codes of E4M3 numbers without a sign, fp32."""
    bits = as_bits(magnitude)
    small = tl.where(bits < EXPONENT, magnitude * 512.0, 0.0).to(tl.int32)  # below 2^-6, in steps of 2^-9
    code = tl.where(magnitude < 2.0**-6, small, (bits >> 20) - ((127 - 7) << 3))
    return tl.where(bits > EXPONENT, 0x7F, code)


@triton.jit
def _block_amaxes(tile, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """(SIDE, SIDE / BLOCK): the largest magnitude of each block of a row, as an integer, nan above all."""
    return tl.max((as_bits(tile) & MAGNITUDE).reshape(SIDE, SIDE // BLOCK, BLOCK), 2)


# --- mxfp8 ---


@triton.jit
def _mxfp8(tile, SIDE: tl.constexpr):
    """Codes (SIDE, SIDE) and scales (SIDE, SIDE / 32) of ops/quantization/mxfp8.py's quantize()."""
    amax = _block_amaxes(tile, 32, SIDE)
    bits = as_bits(as_float(amax) * (1 / 448))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    holds = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000))
    scale = tl.minimum(exponent + tl.where(holds, 0, 1), E8M0_INF)
    scale = tl.where(amax > EXPONENT, E8M0_NAN, scale)
    inverse = tl.maximum((254 - scale) << 23, 0x400000)  # 2^-127 is subnormal
    inverse = tl.where(scale == 0, E8M0_ONE << 23, tl.where(scale == E8M0_NAN, 0x7FC00000, inverse))
    scaled = tile.reshape(SIDE, SIDE // 32, 32) * as_float(inverse)[:, :, None]
    codes = _e4m3_codes(nearest_e4m3(tl.abs(scaled))).reshape(SIDE, SIDE)
    return codes | ((as_bits(tile) >> 24) & 0x80), scale


@triton.jit
def _mxfp8_forms(x, rows, columns, scales, column_scales, M, N, SIDE: tl.constexpr):
    m, n = tl.program_id(1).to(tl.int64) * SIDE, tl.program_id(0).to(tl.int64) * SIDE
    tile = _load(x, m, n, M, N, SIDE)
    codes, of_blocks = _mxfp8(tile, SIDE)
    _store(codes, of_blocks, rows, scales, m, n, M, N, 32, SIDE)
    codes, of_blocks = _mxfp8(tl.trans(tile), SIDE)
    _store(codes, of_blocks, columns, column_scales, n, m, N, M, 32, SIDE)


# --- nvfp4 ---


@triton.jit
def _butterfly(tile, DISTANCE: tl.constexpr, SIDE: tl.constexpr):
    """Sums and differences of numbers so far from each other."""
    pairs = tile.reshape(SIDE * SIDE // (2 * DISTANCE), 2, DISTANCE)
    first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.permute(tl.join(first + second, first - second), (0, 2, 1))


@triton.jit
def _hadamard(tile, SIDE: tl.constexpr):
    """Each 16 numbers of a row, transformed (ops/quantization/hadamard.py) and rounded to bf16."""
    signs = tl.where(((NEGATIVE >> tl.arange(0, 16)) & 1) == 1, -0.25, 0.25)
    tile = tile.reshape(SIDE, SIDE // 16, 16) * signs[None, None, :]
    for stage in tl.static_range(4):
        tile = _butterfly(tile, 1 << stage, SIDE)
    return tile.reshape(SIDE, SIDE).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _bytes(words, GROUPS: tl.constexpr):
    """Four words of random bits for each of GROUPS counters -> (GROUPS, 16), their bytes as fp32 numbers."""
    joined = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    numbers = joined.reshape(GROUPS, 4, 1) >> (8 * tl.arange(0, 4))[None, None, :].to(tl.uint32)
    return (numbers & 255).to(tl.int32).to(tl.float32).reshape(GROUPS, 16)


@triton.jit
def _random_along_rows(key, m, n, N, SIDE: tl.constexpr):
    """Random numbers for a square of the matrix. A counter has those of 2 rows of 8 columns
    (ops/recipes/nvfp4.py, bits_of_operand)."""
    pairs, groups = m // 2 + tl.arange(0, SIDE // 2), n // 8 + tl.arange(0, SIDE // 8)
    counters = (pairs[:, None] * (N // 8) + groups[None, :]).reshape(SIDE * SIDE // 16)
    numbers = _bytes(random_words(counters, key, 0, counters), SIDE * SIDE // 16)
    numbers = numbers.reshape(SIDE // 2, SIDE // 8, 4, 2, 2)
    return tl.permute(numbers, (0, 3, 1, 2, 4)).reshape(SIDE, SIDE)


@triton.jit
def _random_along_columns(key, m, n, N, SIDE: tl.constexpr):
    """The same for its transpose. A counter has those of 16 rows of a column."""
    columns, groups = n + tl.arange(0, SIDE), m // 16 + tl.arange(0, SIDE // 16)
    counters = (groups[None, :] * N + columns[:, None]).reshape(SIDE * SIDE // 16)
    return _bytes(random_words(counters, key, 1, counters), SIDE * SIDE // 16).reshape(SIDE, SIDE)


@triton.jit
def _step(magnitude):
    """The distance from one E2M1 number to the next."""
    return tl.where(magnitude < 2, 0.5, tl.where(magnitude < 4, 1.0, 2.0))


@triton.jit
def _nvfp4(tile, of_all, random, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, SIDE: tl.constexpr):
    """Codes, two a byte (SIDE, SIDE / 2), and scales (SIDE, SIDE / 16) of ops/quantization/nvfp4.py's
    quantize(). random: numbers from 0 to 255."""
    amax = _block_amaxes(tile, 16, SIDE)
    if SQUARE:
        amax = tl.max(amax.reshape(SIDE // 16, 16, SIDE // 16), 1)[:, None, :]
        amax = tl.broadcast_to(amax, SIDE // 16, 16, SIDE // 16).reshape(SIDE, SIDE // 16)
    scale, encode = _scales(as_float(amax), of_all)
    scaled = (tile.reshape(SIDE, SIDE // 16, 16) * encode[:, :, None]).reshape(SIDE, SIDE)
    magnitude = tl.minimum(tl.abs(scaled), 6.0)
    if STOCHASTIC:
        moved = magnitude + random * (_step(magnitude) * (1 / 256))
        step = _step(moved)
        per_step = tl.where(moved < 2, 2.0, tl.where(moved < 4, 1.0, 0.5))
        magnitude = tl.minimum(tl.floor(moved * per_step) * step, 6.0)
    else:
        magnitude = nearest(magnitude, 1, 0)
    large = tl.where(magnitude < 4, magnitude + 2, magnitude * 0.5 + 4)
    codes = tl.where(magnitude < 2, 2 * magnitude, large).to(tl.int32) | ((as_bits(tile) >> 28) & 8)
    first, second = tl.split(codes.reshape(SIDE, SIDE // 2, 2))
    return first | (second << 4), _e4m3_codes(scale)


@triton.jit(do_not_specialize_on_alignment=["amax", "column_amax", "key"])
def _nvfp4_forms(
    x, amax, column_amax, key, rows, columns, scales, column_scales, factor, column_factor, M, N,
    SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(1).to(tl.int64) * SIDE, tl.program_id(0).to(tl.int64) * SIDE
    tile = _load(x, m, n, M, N, SIDE)
    numbers, random = (0, 0, 0, 0), tile
    if STOCHASTIC:
        numbers = load_key(key)
        random = _random_along_rows(numbers, m, n, N, SIDE)
    of_all = _globals(tl.load(amax))
    tl.store(factor, of_all[2])
    codes, of_blocks = _nvfp4(tile, of_all, random, SQUARE, STOCHASTIC, SIDE)
    _store(codes, of_blocks, rows, scales, m, n, M, N, 16, SIDE)
    tile = tl.trans(tile)
    if not SQUARE:
        tile = _hadamard(tile, SIDE)
    if STOCHASTIC:
        random = _random_along_columns(numbers, m, n, N, SIDE)
    of_all = _globals(tl.load(column_amax))
    tl.store(column_factor, of_all[2])
    codes, of_blocks = _nvfp4(tile, of_all, random, SQUARE, STOCHASTIC, SIDE)
    _store(codes, of_blocks, columns, column_scales, n, m, N, M, 16, SIDE)


# --- starting them ---


def triton_mxfp8_forms(x: torch.Tensor, into: Forms) -> Forms:
    """x (M, N), bf16, contiguous -> both of its forms, written into tensors of their shapes."""
    codes = [form.view(torch.uint8) for form in into[:2]]
    _mxfp8_forms[_grid(x)](x, *codes, *into[2:], *x.shape, SIDE=SIDE, num_warps=WARPS)
    return into


def triton_nvfp4_forms(x: torch.Tensor, amaxes: torch.Tensor, key: torch.Tensor | None, into: Forms) -> Forms:
    """x (M, N), bf16, contiguous, and its amaxes (2), fp32, before and after the transform -> both forms,
    the second one transformed. With a key, rounded stochastically."""
    return _start(x, amaxes, amaxes[1:], key, into, square=False)


def triton_nvfp4_weight_forms(weight: torch.Tensor, amax: torch.Tensor, into: Forms) -> Forms:
    """weight (M, N), bf16, contiguous, and its amax, fp32 -> both forms, in blocks of 16 x 16."""
    return _start(weight, amax, amax, None, into, square=True)


def _start(x, amax, column_amax, key, into: Forms, square: bool) -> Forms:
    factors = [scales[-4:].view(torch.float32) for scales in into[2:]]
    _nvfp4_forms[_grid(x)](
        x, amax, column_amax, key, *into, *factors, *x.shape,
        SQUARE=square, STOCHASTIC=key is not None, SIDE=SIDE, num_warps=WARPS,
    )  # fmt: skip
    return into


def _grid(x: torch.Tensor) -> tuple[int, int]:
    """Programs also for the padding of the tiles of scales. Neighboring ones have neighboring columns."""
    across, down = (TILE_ROWS // SIDE * triton.cdiv(side, TILE_ROWS) for side in (x.shape[1], x.shape[0]))
    return across, down
