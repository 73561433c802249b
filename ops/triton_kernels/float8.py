"""The Triton kernel of fp8 training. torch's fp8 matmul takes both operands with the summed dimension
contiguous, so an operand that a weight gradient needs too exists twice, as it is and transposed. One kernel
reads the source once and writes both.

Kernels that compute what they cast (swiglu.py, cross_entropy.py) use float8_bits and store_both, too.

Trap: fp8 numbers leave a kernel as bytes that integer arithmetic made, and never as fp8. On Hopper, a kernel
that converts to fp8 and stores the numbers straight and transposed may store wrong ones, a fault of the ptxas
that comes with Triton (triton-lang/triton issue 11111): 37 % of the transposed values with SwiGLU computed in
the same kernel, 44 % where four bytes are joined to a word (LOG.md).

M rows · N columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE_M, TILE_N, NUM_WARPS = 128, 64, 8  # 128 rows make a transposed row's piece one cache line
# of a number: bits of mantissa, bias of the exponent (Micikevicius et al. 2022, table 1), the largest number
FORMATS = {
    dtype: {"MANTISSA": mantissa, "BIAS": bias, "LIMIT": torch.finfo(dtype).max}
    for dtype, mantissa, bias in ((torch.float8_e4m3fn, 3, 7), (torch.float8_e5m2, 2, 15))
}


@triton.jit
def float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr):
    """x (fp32), saturated and rounded to the nearest fp8 number, of two equally near ones to the even one: as
    bytes."""
    x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    DROPPED: tl.constexpr = 23 - MANTISSA  # bits of fp32's mantissa
    rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # below the smallest normal number, all are multiples of one number: adding a number whose last bit is
    # worth as much makes fp32's own addition round
    ADDED: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
    added = tl.full(x.shape, ADDED, tl.uint32).to(tl.float32, bitcast=True)
    subnormal = (tl.abs(x) + added).to(tl.uint32, bitcast=True) - ADDED
    is_normal = magnitude >= ((127 + 1 - BIAS) << 23)
    return (tl.where(is_normal, normal, subnormal) | ((bits >> 24) & 0x80)).to(tl.uint8)


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
    x, scale, y, yt, M, N, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    m, n, inside = tile(M, N, TILE_M, TILE_N)
    values = tl.load(x + m[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    store_both(y, yt, float8_bits(values, MANTISSA, BIAS, LIMIT), m, n, M, N, inside)


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
    return {**FORMATS[dtype], "TILE_M": TILE_M, "TILE_N": TILE_N, "num_warps": NUM_WARPS}
