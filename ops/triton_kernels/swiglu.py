"""ops/swiglu.py on a GPU: SwiGLU and its backward, in bf16 or fp8, and the largest magnitudes of the results.

N tokens · F feed-forward width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.float8 import as_bytes, empty_pair, float8_bytes, launch, store_both, tile, tiles


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
    x, dh, scale, y, yt, N, F, LIMIT: tl.constexpr, FORMAT: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    token, column, inside = tile(N, F, TILE_M, TILE_N)
    at = x + token[:, None] * 2 * F + column[None, :]
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + F, mask=inside, other=0.0)
    d = tl.load(dh + token[:, None] * F + column[None, :], mask=inside, other=0.0)
    dgate, dup = _gradients(gate, up, d)
    factor = tl.load(scale)
    bits = float8_bytes(dgate.to(tl.float32) * factor, LIMIT, FORMAT)
    store_both(y, yt, bits, token, column, N, 2 * F, inside)
    bits = float8_bytes(dup.to(tl.float32) * factor, LIMIT, FORMAT)
    store_both(y, yt, bits, token, column + F, N, 2 * F, inside)


def triton_swiglu(x: torch.Tensor, amax_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, 2F), gate then up -> silu(gate) * up (N, F), and the largest magnitudes of its parts."""
    N, F = x.shape[0], x.shape[1] // 2
    h = torch.empty(N, F, dtype=x.dtype, device=x.device)
    amax = torch.empty(N, triton.cdiv(F, amax_columns), dtype=torch.float32, device=x.device)
    _swiglu_forward[tuple(amax.shape)](x, h, amax, F, BLOCK=amax_columns, num_warps=8)
    return h, amax


def triton_swiglu_backward(x: torch.Tensor, dh: torch.Tensor, columns: int) -> torch.Tensor:
    """dh (N, F) -> dx (N, 2F); a program handles `columns` columns of a row."""
    N, F = dh.shape
    dx = torch.empty_like(x)
    _swiglu_backward[N, triton.cdiv(F, columns)](x, dh, dx, F, AMAX=False, BLOCK=columns, num_warps=8)
    return dx


def triton_swiglu_backward_amax(x: torch.Tensor, dh: torch.Tensor, columns: int) -> torch.Tensor:
    """The largest magnitudes of triton_swiglu_backward's dx, one for each program."""
    N, F = dh.shape
    amax = torch.empty(N, triton.cdiv(F, columns), dtype=torch.float32, device=x.device)
    _swiglu_backward[tuple(amax.shape)](x, dh, amax, F, AMAX=True, BLOCK=columns, num_warps=8)
    return amax


def triton_swiglu_backward_float8(
    x: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """triton_swiglu_backward's dx times scale in fp8, (N, 2F) and (2F, N)."""
    N, F = dh.shape
    y, yt = empty_pair(x, dtype)
    _swiglu_backward_float8[tiles(N, F)](x, dh, scale, as_bytes(y), as_bytes(yt), N, F, **launch(dtype))
    return y, yt
