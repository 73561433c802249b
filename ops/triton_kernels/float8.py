"""The Triton kernel of fp8 training. torch's fp8 matmul takes both operands with the summed dimension
contiguous, so an operand that a weight gradient needs too exists twice, as it is and transposed. One kernel
reads the source once and writes both.

Trap: the source must be a stored tensor. With SwiGLU computed in the same kernel, Triton 3.6 stored wrong
transposed values (37 % of them, on an H200), and recomputing it for amax and cast was slower, too (LOG.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_M, TILE_N = 128, 64  # 128 rows make a transposed row's piece one cache line


@triton.jit
def _quantize(x, scale, y, yt, M, N, limit, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside = (m < M)[:, None] & (n < N)[None, :]
    m, n = m.to(tl.int64), n.to(tl.int64)
    values = tl.load(x + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    values = tl.minimum(tl.maximum(values, -limit), limit).to(y.dtype.element_ty)
    tl.store(y + m[:, None] * N + n[None, :], values, mask=inside)
    tl.store(yt + n[:, None] * M + m[None, :], tl.trans(values), mask=tl.trans(inside))


def triton_quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out=None):
    """x (M, N) times scale, saturated -> fp8 (M, N) and its transpose (N, M), both contiguous, in `out` if it
    is given."""
    M, N = x.shape
    y, yt = out or (torch.empty(shape, dtype=dtype, device=x.device) for shape in ((M, N), (N, M)))
    grid = triton.cdiv(N, TILE_N), triton.cdiv(M, TILE_M)
    limit = torch.finfo(dtype).max
    _quantize[grid](x, scale, y, yt, M, N, limit, TILE_M=TILE_M, TILE_N=TILE_N, num_warps=8)
    return y, yt
