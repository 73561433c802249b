"""ops/swiglu.py on a GPU: SwiGLU and its backward, in bf16 or fp8, and the largest magnitudes of the results.

x and its gradient (N, 2F) have gate and up beside each other: gate 0, up 0, gate 1, up 1, ...

N tokens · F feed-forward width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.arithmetic import rounded, sigmoid
from ops.triton_kernels.float8 import as_words, empty_pair, launch, pair_tile, store_both, tiles


@triton.jit
def load_pairs(x, row, F, BLOCK: tl.constexpr):
    """gate and up of this program's BLOCK columns of a row of x (N, 2F)."""
    both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    values = tl.load(x + row * 2 * F + both, mask=both < 2 * F, other=0.0)
    return tl.split(tl.reshape(values, (BLOCK, 2)))


@triton.jit
def _swiglu_forward(x, h, amax, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate, up = load_pairs(x, row, F, BLOCK)
    gate = gate.to(tl.float32)
    y = gate * sigmoid(gate) * up.to(tl.float32)
    tl.store(h + row * F + column, y.to(h.dtype.element_ty), mask=inside)
    tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), _largest(y, h.dtype.element_ty))


@triton.jit
def _largest(y, dtype: tl.constexpr):
    """The largest magnitude of y (fp32) rounded to dtype: that of y, rounded, since rounding keeps order."""
    return tl.max(tl.abs(y), 0).to(dtype).to(tl.float32)


@triton.jit
def gradients(gate, up, d):
    """Of gate and up, fp32."""
    gate, up, d = gate.to(tl.float32), up.to(tl.float32), d.to(tl.float32)
    s = sigmoid(gate)
    ds = d * s
    return ds * up * (1 + gate * (1 - s)), ds * gate


@triton.jit
def _swiglu_backward(
    x, dh, to, h, F, AMAX: tl.constexpr, BLOCK: tl.constexpr, PRODUCT: tl.constexpr = False
):  # fmt: skip
    """PRODUCT: writes h, too, as _swiglu_forward does; else nobody looks at that pointer."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate, up = load_pairs(x, row, F, BLOCK)
    d = tl.load(dh + row * F + column, mask=inside, other=0.0)
    dgate, dup = gradients(gate, up, d)
    if AMAX:
        largest = _largest(tl.maximum(tl.abs(dgate), tl.abs(dup)), gate.dtype)
        tl.store(to + row * tl.num_programs(1) + tl.program_id(1), largest)
    else:
        both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        dx = tl.reshape(tl.join(dgate, dup), (2 * BLOCK,)).to(gate.dtype)
        tl.store(to + row * 2 * F + both, dx, mask=both < 2 * F)
    if PRODUCT:
        wide = gate.to(tl.float32)
        y = wide * sigmoid(wide) * up.to(tl.float32)
        tl.store(h + row * F + column, y.to(h.dtype.element_ty), mask=inside)


@triton.jit
def row_gradients(x, dh, row, both, column, F, factor, inside, inside_h):
    """dx of these rows and columns, `both` of x and `column` of h, times factor: rounded first, as
    _swiglu_backward rounds."""
    values = tl.load(x + row[:, None] * 2 * F + both[None, :], mask=inside, other=0.0)
    gate, up = tl.split(tl.reshape(values, (row.shape[0], column.shape[0], 2)))
    d = tl.load(dh + row[:, None] * F + column[None, :], mask=inside_h, other=0.0)
    dgate, dup = gradients(gate, up, d)
    dgate, dup = rounded(dgate, x.dtype.element_ty) * factor, rounded(dup, x.dtype.element_ty) * factor
    return tl.reshape(tl.join(dgate, dup), (row.shape[0], both.shape[0]))


@triton.jit
def _swiglu_backward_float8(
    x, dh, scale, y, yt, N, F, E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    _, column, inside_h = pair_tile(N, F, TILE_M, TILE_N // 2)
    pair, both, inside = pair_tile(N, 2 * F, TILE_M, TILE_N)
    factor = tl.load(scale)
    even = row_gradients(x, dh, 2 * pair, both, column, F, factor, inside, inside_h)
    odd = row_gradients(x, dh, 2 * pair + 1, both, column, F, factor, inside, inside_h)
    store_both(y, yt, even, odd, pair, both, N, 2 * F, inside, E4M3)


def triton_swiglu(x: torch.Tensor, amax_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, 2F) -> silu(gate) * up (N, F), and the largest magnitudes of its parts."""
    N, F = x.shape[0], x.shape[1] // 2
    h = torch.empty(N, F, dtype=x.dtype, device=x.device)
    amax = torch.empty(N, triton.cdiv(F, amax_columns), dtype=torch.float32, device=x.device)
    _swiglu_forward[tuple(amax.shape)](x, h, amax, F, BLOCK=amax_columns, num_warps=8)
    return h, amax


def triton_swiglu_backward(x: torch.Tensor, dh: torch.Tensor, columns: int) -> torch.Tensor:
    """dh (N, F) -> dx (N, 2F); a program handles `columns` columns of a row."""
    N, F = dh.shape
    dx = torch.empty_like(x)
    _swiglu_backward[N, triton.cdiv(F, columns)](x, dh, dx, dh, F, AMAX=False, BLOCK=columns, num_warps=8)
    return dx


def triton_swiglu_backward_and_product(
    x: torch.Tensor, dh: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """triton_swiglu_backward's dx, and triton_swiglu's h (N, F)."""
    N, F = dh.shape
    dx, h = torch.empty_like(x), torch.empty_like(dh)
    _swiglu_backward[N, triton.cdiv(F, columns)](
        x, dh, dx, h, F, AMAX=False, BLOCK=columns, PRODUCT=True, num_warps=8
    )
    return dx, h


def triton_swiglu_backward_amax(x: torch.Tensor, dh: torch.Tensor, columns: int) -> torch.Tensor:
    """The largest magnitudes of triton_swiglu_backward's dx, one for each program."""
    N, F = dh.shape
    amax = torch.empty(N, triton.cdiv(F, columns), dtype=torch.float32, device=x.device)
    _swiglu_backward[tuple(amax.shape)](x, dh, amax, dh, F, AMAX=True, BLOCK=columns, num_warps=8)
    return amax


def triton_swiglu_backward_float8(
    x: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """triton_swiglu_backward's dx times scale in fp8, (N, 2F) and (2F, N)."""
    N, F = dh.shape
    y, yt = empty_pair(x, dtype)
    _swiglu_backward_float8[tiles(N, 2 * F)](x, dh, scale, *as_words(y, yt), N, F, **launch(dtype))
    return y, yt
