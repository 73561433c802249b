"""The Triton kernel of mxfp8 and nvfp4 on tensor cores: a bf16 matrix as codes, and scales in tiles.

It gives the bits of recipes/block_scaled.py's plain forms. A program has a square of the matrix. It makes
the form along rows from it, and from its transpose, in the same way, the form along columns. Rounding is
exact arithmetic on fp32 numbers and their bits (float_bits.py). No number is one of Triton's fp8: float8.py
says why.

M rows · N columns of the matrix; R rows · K columns of a form, the matrix or its transpose
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.philox import load_key, random_words
from recipes.formats.hadamard import NEGATIVE_ROWS
from recipes.kernels.float_bits import EXPONENT, MAGNITUDE, as_bits, as_float, nearest_e4m3
from recipes.kernels.nvfp4 import _as_bf16, _globals, _scales, _values

SIDE, WARPS = 64, 8  # of a program's square: 16 numbers a thread, so that the code fits a cache (nvfp4.py)
NEGATIVE = tl.constexpr(NEGATIVE_ROWS)

Forms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _store(codes, scales, out, into, r, k, R, K, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """What the square at (r, k) of a form (R, K) has become: codes (SIDE, bytes), and scales (SIDE, blocks),
    which are written with the padding of their tiles (recipes/formats/scale_layout.py)."""
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


@triton.jit
def _mxfp8(tile, SIDE: tl.constexpr):
    """Codes (SIDE, SIDE) and scales (SIDE, SIDE / 32), as recipes/formats/mxfp8.py's quantize() has them."""
    amax = _block_amaxes(tile, 32, SIDE)
    bits = as_bits(as_float(amax) * (1 / 448))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    holds = (mantissa == 0) | ((exponent == 0) & (mantissa <= 0x400000))
    scale = tl.where(amax > EXPONENT, 255, tl.minimum(exponent + tl.where(holds, 0, 1), 254))
    inverse = tl.maximum((254 - scale) << 23, 0x400000)  # 2^-127 is subnormal
    inverse = tl.where(scale == 0, 127 << 23, tl.where(scale == 255, 0x7FC00000, inverse))
    scaled = tile.reshape(SIDE, SIDE // 32, 32) * as_float(inverse)[:, :, None]
    codes = _e4m3_codes(nearest_e4m3(tl.abs(scaled))).reshape(SIDE, SIDE)
    return codes | ((as_bits(tile) >> 24) & 0x80), scale


@triton.jit
def _nvfp4(tile, of_all, random, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, SIDE: tl.constexpr):
    """Codes, two a byte (SIDE, SIDE / 2), and scales (SIDE, SIDE / 16) of recipes/formats/nvfp4.py's
    quantize(). of_all, random: as for nvfp4.py's functions."""
    amax = _block_amaxes(tile, 16, SIDE)
    if SQUARE:
        amax = tl.max(amax.reshape(SIDE // 16, 16, SIDE // 16), 1)[:, None, :]
        amax = tl.broadcast_to(amax, SIDE // 16, 16, SIDE // 16).reshape(SIDE, SIDE // 16)
    scale, encode = _scales(as_float(amax), of_all)
    blocks = tile.reshape(SIDE, SIDE // 16, 16)
    number = _values(blocks, 1.0, encode[:, :, None], 1.0, random, STOCHASTIC).reshape(SIDE, SIDE)
    large = tl.where(number < 4, number + 2, number * 0.5 + 4)
    codes = tl.where(number < 2, 2 * number, large).to(tl.int32) | ((as_bits(tile) >> 28) & 8)
    first, second = tl.split(codes.reshape(SIDE, SIDE // 2, 2))
    return first | (second << 4), _e4m3_codes(scale)


@triton.jit
def _butterfly(tile, DISTANCE: tl.constexpr, SIDE: tl.constexpr):
    """Sums and differences of numbers so far from each other."""
    pairs = tile.reshape(SIDE * SIDE // (2 * DISTANCE), 2, DISTANCE)
    first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
    return tl.permute(tl.join(first + second, first - second), (0, 2, 1))


@triton.jit
def _hadamard(tile, SIDE: tl.constexpr):
    """Each 16 numbers of a row, transformed (recipes/formats/hadamard.py) and rounded to bf16."""
    signs = tl.where(((NEGATIVE >> tl.arange(0, 16)) & 1) == 1, -0.25, 0.25)
    tile = tile.reshape(SIDE, SIDE // 16, 16) * signs[None, None, :]
    for stage in tl.static_range(4):
        tile = _butterfly(tile, 1 << stage, SIDE)
    return _as_bf16(tile.reshape(SIDE, SIDE))


@triton.jit
def _random(counters, key, STREAM: tl.constexpr, COUNT: tl.constexpr):
    """Of COUNT counters -> (COUNT, 16), random bytes as nvfp4.py's _random_number has them."""
    words = random_words(counters, key, STREAM, counters)
    joined = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3])).reshape(COUNT, 4, 1)
    numbers = (joined >> (8 * tl.arange(0, 4))[None, None, :].to(tl.uint32)) & 255
    return as_float((numbers << 16).to(tl.int32)).reshape(COUNT, 16)


# which counter has whose bits: recipes/nvfp4.py, bits_of_operand
@triton.jit(do_not_specialize_on_alignment=["amaxes", "column_amax", "key"])
def _block_forms(
    x, amaxes, column_amax, key, rows, columns, scales, column_scales, factor, column_factor, M, N,
    FP4: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = 16 if FP4 else 32
    COUNT: tl.constexpr = SIDE * SIDE // 16
    m, n = tl.program_id(1).to(tl.int64) * SIDE, tl.program_id(0).to(tl.int64) * SIDE
    down, along = m + tl.arange(0, SIDE)[:, None], n + tl.arange(0, SIDE)[None, :]
    tile = tl.load(x + down * N + along, mask=(down < M) & (along < N), other=0).to(tl.float32)
    turned = tl.trans(tile)
    if FP4:
        of_all, of_columns = _globals(tl.load(amaxes)), _globals(tl.load(column_amax))
        tl.store(factor, of_all[2])
        tl.store(column_factor, of_columns[2])
        random, column_random = 0, 0
        if STOCHASTIC:
            numbers = load_key(key)
            pairs, groups = m // 2 + tl.arange(0, SIDE // 2), n // 8 + tl.arange(0, SIDE // 8)
            random = _random((pairs[:, None] * (N // 8) + groups[None, :]).reshape(COUNT), numbers, 0, COUNT)
            random = tl.permute(random.reshape(SIDE // 2, SIDE // 8, 4, 2, 2), (0, 3, 1, 2, 4))
            random = random.reshape(SIDE, SIDE // 16, 16)
            groups = m // 16 + tl.arange(0, SIDE // 16)
            counters = (groups[None, :] * N + (n + tl.arange(0, SIDE))[:, None]).reshape(COUNT)
            column_random = _random(counters, numbers, 1, COUNT).reshape(SIDE, SIDE // 16, 16)
        if not SQUARE:
            turned = _hadamard(turned, SIDE)
        codes, of_blocks = _nvfp4(tile, of_all, random, SQUARE, STOCHASTIC, SIDE)
        column_codes, of_column_blocks = _nvfp4(turned, of_columns, column_random, SQUARE, STOCHASTIC, SIDE)
    else:
        codes, of_blocks = _mxfp8(tile, SIDE)
        column_codes, of_column_blocks = _mxfp8(turned, SIDE)
    _store(codes, of_blocks, rows, scales, m, n, M, N, BLOCK, SIDE)
    _store(column_codes, of_column_blocks, columns, column_scales, n, m, N, M, BLOCK, SIDE)


def triton_block_forms(
    x: torch.Tensor, amaxes: torch.Tensor | None, key: torch.Tensor | None, into: Forms
) -> Forms:
    """block_forms() of x (M, N), bf16, contiguous, written into tensors of its results' shapes."""
    codes, fp4 = [form.view(torch.uint8) for form in into[:2]], amaxes is not None
    factors = [scales[-4:].view(torch.float32) if fp4 else None for scales in into[2:]]
    across, down = (2 * triton.cdiv(side, 2 * SIDE) for side in reversed(x.shape))  # also a tile's padding
    _block_forms[across, down](  # neighboring programs have neighboring columns
        x, amaxes, None if amaxes is None else amaxes[-1:], key, *codes, *into[2:], *factors, *x.shape,
        FP4=fp4, SQUARE=amaxes is not None and len(amaxes) == 1, STOCHASTIC=key is not None,
        SIDE=SIDE, num_warps=WARPS,
    )  # fmt: skip
    return into
