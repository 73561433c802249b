"""The Triton kernel of fp8 training. torch's fp8 matmul takes both operands with the summed dimension
contiguous, so an operand that a weight gradient needs too exists twice, as it is and transposed. One kernel
reads the source once and writes both.

How a tile is transposed: four neighboring rows are loaded one after another in the same layout, so a thread
has the four bytes that are neighbors in the transposed matrix. It makes one word of them; threads exchange
and store words instead of bytes.

Trap: fp8 numbers leave a kernel as bytes, never as fp8. On Hopper, a kernel that stores fp8 numbers straight
and transposed can store wrong ones, a fault of the ptxas that comes with Triton 3.6 (triton-lang/triton issue
11111). With SwiGLU computed in the same kernel, 37 % of the transposed values were wrong on an H200 (LOG.md).

M rows · N columns · W words in a row of the transposed matrix, M / 4 rounded up
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# 128 rows make a transposed row's piece one cache line
TILE_M, TILE_N, NUM_WARPS = 128, 64, 4
TRITON_DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def float8_bytes(values, scale, limit, DTYPE: tl.constexpr):
    """values (fp32) times scale, saturated, in fp8: as bytes."""
    values = tl.minimum(tl.maximum(values * scale, -limit), limit)
    return values.to(DTYPE).to(tl.uint8, bitcast=True)


@triton.jit
def store_transposed(yt, words, first_word, first_column, W, N):
    """A tile's words (word in a row of yt, row of yt) to yt (N, W). W is an argument, because Triton does not
    know what divides the quotient M // 4, and would store the words one by one."""
    word = tl.arange(0, words.shape[0])
    column = tl.arange(0, words.shape[1])
    inside = (first_column + column < N)[:, None] & (first_word + word < W)[None, :]
    at = first_column * W + first_word + (column[:, None] * W + word[None, :])
    tl.store(yt + at, tl.trans(words), mask=inside)


@triton.jit
def _quantize(
    x,
    scale,
    y,
    yt,
    M,
    N,
    W,
    limit,
    DTYPE: tl.constexpr,
    IN_WORDS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    tile, first_column = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * TILE_N
    word, column = tl.arange(0, TILE_M // 4), tl.arange(0, TILE_N)
    corner = tile * TILE_M * N + first_column
    columns_inside = (first_column + column < N)[None, :]
    factor = tl.load(scale)
    values = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(4):  # all loads before the first store, which none of them would overtake
        row = word * 4 + i
        inside = (tile * TILE_M + row < M)[:, None] & columns_inside
        values += (tl.load(x + corner + (row[:, None] * N + column[None, :]), mask=inside, other=0.0),)
    words = tl.zeros((TILE_M // 4, TILE_N), tl.uint32)
    for i in tl.static_range(4):
        row = word * 4 + i
        inside = (tile * TILE_M + row < M)[:, None] & columns_inside
        bits = float8_bytes(values[i].to(tl.float32), factor, limit, DTYPE)
        tl.store(y + corner + (row[:, None] * N + column[None, :]), bits, mask=inside)
        if IN_WORDS:
            words |= bits.to(tl.uint32) << (8 * i)
        else:
            to = first_column * M + tile * TILE_M + (column[:, None] * M + row[None, :])
            tl.store(yt + to, tl.trans(bits), mask=tl.trans(inside))
    if IN_WORDS:
        store_transposed(yt, words, tile * (TILE_M // 4), first_column, W, N)


def as_bytes(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.uint8)


def as_words(yt: torch.Tensor) -> torch.Tensor:
    return yt.view(torch.uint32)


def triton_quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out=None):
    """x (M, N) times scale, saturated -> fp8 (M, N) and its transpose (N, M), both contiguous, in `out` if it
    is given."""
    M, N = x.shape
    y, yt = out or empty_pair(x, dtype)
    in_words = M % 4 == 0
    _quantize[triton.cdiv(N, TILE_N), triton.cdiv(M, TILE_M)](
        x,
        scale,
        as_bytes(y),
        as_words(yt) if in_words else as_bytes(yt),
        M,
        N,
        triton.cdiv(M, 4),
        torch.finfo(dtype).max,
        DTYPE=TRITON_DTYPES[dtype],
        IN_WORDS=in_words,
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        num_warps=NUM_WARPS,
    )
    return y, yt


def empty_pair(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for x (M, N) in another dtype, and for its transpose."""
    M, N = x.shape
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)
