"""Triton kernels for fp8 training. Hopper's fp8 matmul takes both operands with the summed dimension contiguous,
so an operand that a weight gradient needs too exists twice, as it is and transposed: one kernel reads the source
once and writes both. float8.py says what they compute.

    M tokens · N width · F feed-forward width · V vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_M, TILE_N = 128, 64  # 128 rows make a transposed row's piece one cache line
AMAX_BLOCK = 1024


@triton.jit
def _store_both(values, limit, y, yt, m, n, M, N, inside):
    """Saturated fp8 values of a tile, as they are and transposed."""
    values = tl.minimum(tl.maximum(values, -limit), limit).to(y.dtype.element_ty)
    m, n = m.to(tl.int64), n.to(tl.int64)
    tl.store(y + m[:, None] * N + n[None, :], values, mask=inside)
    tl.store(yt + n[:, None] * M + m[None, :], tl.trans(values), mask=tl.trans(inside))


@triton.jit
def _quantize(x, scale, y, yt, M, N, limit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside = (m < M)[:, None] & (n < N)[None, :]
    values = tl.load(x + m.to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    _store_both(values * tl.load(scale), limit, y, yt, m, n, M, N, inside)


@triton.jit
def _swiglu_amax(x, partial, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(gate * tl.sigmoid(gate) * up), 0)
    tl.store(partial + row * tl.num_programs(1) + tl.program_id(1), amax)


@triton.jit
def _swiglu_quantize(x, scale, h, ht, M, F, limit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside = (m < M)[:, None] & (n < F)[None, :]
    at = x + m.to(tl.int64)[:, None] * 2 * F + n[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    _store_both(gate * tl.sigmoid(gate) * up * tl.load(scale), limit, h, ht, m, n, M, F, inside)


@triton.jit
def _swiglu_gradients(gate, up, d):
    sigmoid = tl.sigmoid(gate)
    return d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid


@triton.jit
def _swiglu_backward_amax(x, dh, partial, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh + row * F + column, mask=inside, other=0.0).to(tl.float32)
    dgate, dup = _swiglu_gradients(gate, up, d)
    amax = tl.max(tl.maximum(tl.abs(dgate), tl.abs(dup)), 0)
    tl.store(partial + row * tl.num_programs(1) + tl.program_id(1), amax)


@triton.jit
def _swiglu_backward_quantize(x, dh, scale, dx, dxt, M, F, limit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside = (m < M)[:, None] & (n < F)[None, :]
    rows = m.to(tl.int64)[:, None]
    at = x + rows * 2 * F + n[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh + rows * F + n[None, :], mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    dgate, dup = _swiglu_gradients(gate, up, d)
    _store_both(dgate, limit, dx, dxt, m, n, M, 2 * F, inside)
    _store_both(dup, limit, dx, dxt, m, n + F, M, 2 * F, inside)


@triton.jit
def _loss_gradient(
    logits, targets, log_sums, scale, g, gt, M, V, limit, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside = (m < M)[:, None] & (n < V)[None, :]
    x = tl.load(logits + m.to(tl.int64)[:, None] * V + n[None, :], mask=inside, other=0.0).to(tl.float32)
    target = tl.load(targets + m, mask=m < M, other=-1)[:, None]
    p = tl.exp(x - tl.load(log_sums + m, mask=m < M, other=0.0)[:, None])
    p = tl.where(target == n[None, :], p - 1.0, p)
    _store_both(tl.where(target >= 0, p * scale, 0.0), limit, g, gt, m, n, M, V, inside)


# --- launching ---


def _both(M: int, N: int, dtype: torch.dtype, device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(M, N, dtype=dtype, device=device), torch.empty(N, M, dtype=dtype, device=device)


def _tiles(M: int, N: int) -> tuple[int, int]:
    return triton.cdiv(N, TILE_N), triton.cdiv(M, TILE_M)


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out=None):
    """x (M, N) times scale, saturated -> fp8 (M, N) and its transpose (N, M), both contiguous."""
    M, N = x.shape
    y, yt = out or _both(M, N, dtype, x.device)
    limit = torch.finfo(dtype).max
    _quantize[_tiles(M, N)](x, scale, y, yt, M, N, limit, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=8)
    return y, yt


def swiglu_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of silu(gate) * up, for x (M, 2F); the product is not kept."""
    M, F = x.shape[0], x.shape[1] // 2
    partial = torch.empty(M, triton.cdiv(F, AMAX_BLOCK), dtype=torch.float32, device=x.device)
    _swiglu_amax[tuple(partial.shape)](x, partial, F, BLOCK=AMAX_BLOCK)
    return partial.amax()


def swiglu_quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
    """silu(gate) * up times scale -> fp8 (M, F) and (F, M)."""
    M, F = x.shape[0], x.shape[1] // 2
    h, ht = _both(M, F, dtype, x.device)
    limit = torch.finfo(dtype).max
    _swiglu_quantize[_tiles(M, F)](x, scale, h, ht, M, F, limit, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=8)
    return h, ht


def swiglu_backward_amax(x: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of the gradient of x (M, 2F), for dh (M, F)."""
    M, F = dh.shape
    partial = torch.empty(M, triton.cdiv(F, AMAX_BLOCK), dtype=torch.float32, device=x.device)
    _swiglu_backward_amax[tuple(partial.shape)](x, dh, partial, F, BLOCK=AMAX_BLOCK)
    return partial.amax()


def swiglu_backward_quantize(x: torch.Tensor, dh: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
    """The gradient of x (M, 2F) times scale -> fp8 (M, 2F) and (2F, M)."""
    M, F = dh.shape
    dx, dxt = _both(M, 2 * F, dtype, x.device)
    limit = torch.finfo(dtype).max
    _swiglu_backward_quantize[_tiles(M, F)](
        x, dh, scale, dx, dxt, M, F, limit, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=8
    )
    return dx, dxt


def loss_gradient(logits, targets, log_sums, scale: float, dtype: torch.dtype):
    """softmax - one_hot times scale, 0 for a negative target -> fp8 (M, V) and (V, M)."""
    M, V = logits.shape
    g, gt = _both(M, V, dtype, logits.device)
    limit = torch.finfo(dtype).max
    _loss_gradient[_tiles(M, V)](
        logits, targets, log_sums, scale, g, gt, M, V, limit, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=8
    )
    return g, gt
