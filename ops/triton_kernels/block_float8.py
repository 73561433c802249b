"""The Triton kernels of fp8 in blocks: ops/block_float8.py on a GPU.

An operand is quantized twice, in blocks of 1 x 128 and of 128 x 1, since one matmul sums over its columns and
one over its rows. A program has a tile of 128 x 128: it reads it once, has the amax of every block, and
writes both forms, the second one transposed. Tiles come as even and odd rows, and fp8 numbers as bytes
(float8.py). Numbers are E4M3.

A scale is 448 / amax, rounded down to a power of two. 448 is 1.75 * 2^8, so a scale's exponent is 8 less that
of the amax, and one less where the amax's mantissa is above 1.75: no division.

M rows · N columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.float8 import (
    as_words,
    empty_pair,
    pair_tile,
    store_both,
    store_rows,
    store_transposed,
)
from ops.triton_kernels.float_bits import (
    ABOVE_1_75,
    EXPONENT,
    EXPONENT_AND_SIGN,
    as_bits,
    as_float,
    larger,
    largest,
    nearest_e4m3,
    with_sign_of,
)

BLOCK = tl.constexpr(128)
NUM_WARPS = 8


@triton.jit
def _scales(amax):
    """amax of blocks, fp32 -> what a block is multiplied by, and its inverse; 1 where amax is 0, inf or nan.
    In bits, an exponent has 127 added to it; that of 448 is 8, and a scale's is at most 127."""
    bits = as_bits(amax)
    code = tl.maximum(bits + ABOVE_1_75, 8 << 23) & EXPONENT_AND_SIGN
    scale = ((2 * 127 + 8) << 23) - (1 << 32) - code
    usual = (bits - 1).to(tl.uint32, bitcast=True) < EXPONENT - 1
    scale = tl.where(usual, scale, 127 << 23)
    inverse = tl.maximum((2 * 127 << 23) - scale, 0x400000)  # 2^-127 is subnormal
    return as_float(scale), as_float(inverse)


@triton.jit
def _load_tile(x, M, N):
    """The even and the odd rows of this program's tile, fp32, and where they are."""
    pair, n, inside = pair_tile(M, N, BLOCK, BLOCK)
    at = x + pair[:, None] * 2 * N + n[None, :]
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    return even, odd, pair, n, inside


@triton.jit
def _block_operand(x, y, scales, yt, transposed_scales, M, N):
    even, odd, pair, n, inside = _load_tile(x, M, N)
    even_scale, even_inverse = _scales(largest(tl.abs(even), 1))
    odd_scale, odd_inverse = _scales(largest(tl.abs(odd), 1))
    column_scale, column_inverse = _scales(largest(larger(tl.abs(even), tl.abs(odd)), 0))
    row = tl.program_id(0).to(tl.int64) * M + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(scales + row, tl.interleave(even_inverse, odd_inverse))
    tl.store(transposed_scales + tl.program_id(1).to(tl.int64) * N + n, column_inverse)
    store_rows(y, even * even_scale[:, None], odd * odd_scale[:, None], pair, n, N, inside, True)
    column_scale = column_scale[None, :]
    store_transposed(yt, even * column_scale, odd * column_scale, pair, n, M, inside, True)


@triton.jit
def _block_weight(w, y, scales, yt, transposed_scales, M, N, LENGTH, TRANSPOSED_LENGTH):
    even, odd, pair, n, inside = _load_tile(w, M, N)
    scale, inverse = _scales(largest(largest(larger(tl.abs(even), tl.abs(odd)), 1), 0))
    tl.store(scales + tl.program_id(1) * LENGTH + tl.program_id(0), inverse)
    tl.store(transposed_scales + tl.program_id(0) * TRANSPOSED_LENGTH + tl.program_id(1), inverse)
    store_both(y, yt, even * scale, odd * scale, pair, n, M, N, inside, True)


# --- emulated in bf16 ---


@triton.jit
def _load_block(x, N):
    """This program's 128 x 128 numbers, fp32, and where they are."""
    row = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * N + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(x + at).to(tl.float32), at


@triton.jit
def _values(x, scale, inverse):
    return (with_sign_of(nearest_e4m3(tl.abs(x * scale)), x) * inverse).to(tl.bfloat16)


@triton.jit
def _block_emulated(x, by_rows, by_columns, N):
    values, at = _load_block(x, N)
    scale, inverse = _scales(largest(tl.abs(values), 1))
    tl.store(by_rows + at, _values(values, scale[:, None], inverse[:, None]))
    scale, inverse = _scales(largest(tl.abs(values), 0))
    tl.store(by_columns + at, _values(values, scale[None, :], inverse[None, :]))


@triton.jit
def _block_emulated_weight(w, out, N):
    values, at = _load_block(w, N)
    scale, inverse = _scales(largest(largest(tl.abs(values), 1), 0))
    tl.store(out + at, _values(values, scale, inverse))


# --- starting them ---


def triton_block_operand(
    x: torch.Tensor, scales: torch.Tensor, transposed_scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous -> its values in fp8 (M, N) and, in blocks along columns, transposed (N, M).
    Writes the inverse scales to scales (N / 128, M) and transposed_scales (M / 128, N), fp32."""
    y, yt = empty_pair(x, torch.float8_e4m3fn)
    words, transposed = as_words(y, yt)
    _block_operand[_grid(x)](x, words, scales, transposed, transposed_scales, *x.shape, num_warps=NUM_WARPS)
    return y, yt


def triton_block_weight(
    w: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor,
    yt: torch.Tensor,
    transposed_scales: torch.Tensor,
) -> None:
    """Writes w (N, K), bf16, contiguous, in blocks of 128 x 128 to y (N, K) and yt (K, N), fp8; and the
    inverse scales to scales (N / 128, K / 128) and transposed_scales (K / 128, N / 128), fp32, whose rows may
    be longer than that."""
    words, transposed = as_words(y, yt)
    lengths = scales.shape[1], transposed_scales.shape[1]
    _block_weight[_grid(w)](
        w, words, scales, transposed, transposed_scales, *w.shape, *lengths, num_warps=NUM_WARPS
    )


def triton_block_emulated_operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, N), bf16, contiguous -> its numbers in blocks along rows, and along columns, bf16."""
    by_rows, by_columns = torch.empty_like(x), torch.empty_like(x)
    _block_emulated[_grid(x)](x, by_rows, by_columns, x.shape[1], num_warps=NUM_WARPS)
    return by_rows, by_columns


def triton_block_emulated_weight(w: torch.Tensor) -> torch.Tensor:
    """w (N, K), bf16, contiguous -> its numbers in blocks of 128 x 128, bf16."""
    out = torch.empty_like(w)
    _block_emulated_weight[_grid(w)](w, out, w.shape[1], num_warps=NUM_WARPS)
    return out


def _grid(x: torch.Tensor) -> tuple[int, int]:
    """Neighboring programs have neighboring columns."""
    return x.shape[1] // BLOCK.value, x.shape[0] // BLOCK.value
