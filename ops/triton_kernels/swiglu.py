"""ops/swiglu.py on a GPU: SwiGLU and its backward, in bf16 or fp8, and the largest magnitudes of the results.

N tokens · F feed-forward width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.float8 import (
    NUM_WARPS,
    TILE_M,
    TILE_N,
    TRITON_DTYPES,
    as_bytes,
    as_words,
    empty_pair,
    float8_bytes,
    store_transposed,
)


@triton.jit
def _swiglu_forward(x, h, amax, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty)
    tl.store(h + row * F + column, y, mask=inside)
    tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.abs(y.to(tl.float32)), 0))


@triton.jit
def _gradients(gate, up, d):
    """Of gate and up, rounded as they are: what one kernel finds the largest of is what another casts."""
    dtype = gate.dtype
    gate, up, d = gate.to(tl.float32), up.to(tl.float32), d.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    return (d * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype), (d * gate * sigmoid).to(dtype)


@triton.jit
def _swiglu_backward(x, dh, to, F, AMAX: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0)
    d = tl.load(dh + row * F + column, mask=inside, other=0.0)
    dgate, dup = _gradients(gate, up, d)
    if AMAX:
        largest = tl.max(tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32))), 0)
        tl.store(to + row * tl.num_programs(1) + tl.program_id(1), largest)
    else:
        tl.store(to + row * 2 * F + column, dgate, mask=inside)
        tl.store(to + row * 2 * F + F + column, dup, mask=inside)


@triton.jit
def _swiglu_backward_float8(
    x,
    dh,
    scale,
    y,
    yt,
    N,
    F,
    W,
    limit,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    tile, first_column = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * TILE_N
    word, column = tl.arange(0, TILE_M // 4), tl.arange(0, TILE_N)
    corner = tile * TILE_M * 2 * F + first_column
    columns_inside = (first_column + column < F)[None, :]
    factor = tl.load(scale)
    gate = ()  # type: tuple[tl.tensor, ...]
    up = ()  # type: tuple[tl.tensor, ...]
    d = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(4):  # all loads before the first store, which none of them would overtake
        row = word * 4 + i
        inside = (tile * TILE_M + row < N)[:, None] & columns_inside
        at = corner + (row[:, None] * (2 * F) + column[None, :])
        gate += (tl.load(x + at, mask=inside, other=0.0),)
        up += (tl.load(x + at + F, mask=inside, other=0.0),)
        at_h = tile * TILE_M * F + first_column + (row[:, None] * F + column[None, :])
        d += (tl.load(dh + at_h, mask=inside, other=0.0),)
    gate_words, up_words = (
        tl.zeros((TILE_M // 4, TILE_N), tl.uint32),
        tl.zeros((TILE_M // 4, TILE_N), tl.uint32),
    )
    for i in tl.static_range(4):
        row = word * 4 + i
        inside = (tile * TILE_M + row < N)[:, None] & columns_inside
        at = corner + (row[:, None] * (2 * F) + column[None, :])
        dgate, dup = _gradients(gate[i], up[i], d[i])
        gate_bits = float8_bytes(dgate.to(tl.float32), factor, limit, DTYPE)
        up_bits = float8_bytes(dup.to(tl.float32), factor, limit, DTYPE)
        tl.store(y + at, gate_bits, mask=inside)
        tl.store(y + at + F, up_bits, mask=inside)
        gate_words |= gate_bits.to(tl.uint32) << (8 * i)
        up_words |= up_bits.to(tl.uint32) << (8 * i)
    store_transposed(yt, gate_words, tile * (TILE_M // 4), first_column, W, F)
    store_transposed(yt + F.to(tl.int64) * W, up_words, tile * (TILE_M // 4), first_column, W, F)


def triton_swiglu(x: torch.Tensor, amax_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, 2F), gate then up -> silu(gate) * up (N, F), and the largest magnitudes of its parts."""
    N, F = x.shape[0], x.shape[1] // 2
    h = torch.empty(N, F, dtype=x.dtype, device=x.device)
    amax = torch.empty(N, triton.cdiv(F, amax_columns), dtype=torch.float32, device=x.device)
    _swiglu_forward[tuple(amax.shape)](x, h, amax, F, BLOCK=amax_columns)
    return h, amax


def triton_swiglu_backward(x: torch.Tensor, dh: torch.Tensor, columns: int) -> torch.Tensor:
    """dh (N, F) -> dx (N, 2F); a program handles `columns` columns of a row."""
    N, F = dh.shape
    dx = torch.empty_like(x)
    _swiglu_backward[N, triton.cdiv(F, columns)](x, dh, dx, F, AMAX=False, BLOCK=columns)
    return dx


def triton_swiglu_backward_amax(x: torch.Tensor, dh: torch.Tensor, columns: int) -> torch.Tensor:
    """The largest magnitudes of triton_swiglu_backward's dx, one for each program."""
    N, F = dh.shape
    amax = torch.empty(N, triton.cdiv(F, columns), dtype=torch.float32, device=x.device)
    _swiglu_backward[tuple(amax.shape)](x, dh, amax, F, AMAX=True, BLOCK=columns)
    return amax


def triton_swiglu_backward_float8(
    x: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """triton_swiglu_backward's dx times scale in fp8, (N, 2F) and (2F, N)."""
    N, F = dh.shape
    assert N % 4 == 0, N  # the fp8 matmul of the weight gradient needs a multiple of 16
    y, yt = empty_pair(x, dtype)
    _swiglu_backward_float8[triton.cdiv(F, TILE_N), triton.cdiv(N, TILE_M)](
        x,
        dh,
        scale,
        as_bytes(y),
        as_words(yt),
        N,
        F,
        N // 4,
        torch.finfo(dtype).max,
        DTYPE=TRITON_DTYPES[dtype],
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        num_warps=NUM_WARPS,
    )
    return y, yt
