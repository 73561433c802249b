"""The Triton kernel of fp8 training. torch's fp8 matmul takes both operands with the summed dimension
contiguous, so an operand that a weight gradient needs too exists twice, as it is and transposed. One kernel
reads the source once and writes both.

Kernels that compute what they cast (swiglu.py, cross_entropy.py) use float8_bytes and store_both, too.

Trap: fp8 numbers leave a kernel as bytes, each by itself. On Hopper, a kernel that stores fp8 numbers as they
are and transposed may store wrong ones, a fault of the ptxas that comes with Triton (triton-lang/triton issue
11111): 37 % of the transposed values with SwiGLU computed in the same kernel, 44 % where four bytes were
joined to a word (LOG.md). So training/optimization/precision.py compares each kernel with plain arithmetic at
the start.

M rows · N columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_M, TILE_N, NUM_WARPS = 128, 64, 8  # 128 rows make a transposed row's piece one cache line
FORMATS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def float8_bytes(x, LIMIT: tl.constexpr, FORMAT: tl.constexpr):
    """x (fp32), saturated and rounded to fp8: as bytes."""
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT).to(FORMAT).to(tl.uint8, bitcast=True)


@triton.jit
def store_both(y, yt, bits, m, n, M, N, inside):
    """A tile's bytes (rows m, columns n) to y (M, N) and to its transpose yt (N, M)."""
    tl.store(y + m[:, None] * N + n[None, :], bits, mask=inside)
    tl.store(yt + n[:, None] * M + m[None, :], tl.trans(bits), mask=tl.trans(inside))


@triton.jit
def tile(M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The rows and columns of this program's tile, and which of its elements are inside of (M, N)."""
    m = (tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    return m, n, (m < M)[:, None] & (n < N)[None, :]


@triton.jit
def _quantize(
    x, scale, y, yt, M, N, LIMIT: tl.constexpr, FORMAT: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    m, n, inside = tile(M, N, TILE_M, TILE_N)
    values = tl.load(x + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    store_both(y, yt, float8_bytes(values, LIMIT, FORMAT), m, n, M, N, inside)


def triton_quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out=None):
    """x (M, N) times scale, saturated -> fp8 (M, N) and its transpose (N, M), both contiguous, in `out` if it
    is given."""
    M, N = x.shape
    y, yt = out or empty_pair(x, dtype)
    _quantize[tiles(M, N)](x, scale, as_bytes(y), as_bytes(yt), M, N, **launch(dtype))
    return y, yt


def empty_pair(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for x (M, N) in another dtype, and for its transpose."""
    M, N = x.shape
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)


def as_bytes(y: torch.Tensor) -> torch.Tensor:
    return y.view(torch.uint8)


def tiles(M: int, N: int) -> tuple[int, int]:
    """The grid of programs that handle a tile each."""
    return triton.cdiv(N, TILE_N), triton.cdiv(M, TILE_M)


def launch(dtype: torch.dtype) -> dict:
    """The constants of a kernel that writes dtype in tiles."""
    constants = {"LIMIT": torch.finfo(dtype).max, "FORMAT": FORMATS[dtype]}
    return {**constants, "TILE_M": TILE_M, "TILE_N": TILE_N, "num_warps": NUM_WARPS}
