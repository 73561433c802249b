"""The Triton kernel of fp8 training. torch's fp8 matmul takes both operands with the summed dimension
contiguous, so an operand that a weight gradient needs too exists twice, as it is and transposed. One kernel
reads the source once and writes both.

Kernels that compute what they cast (swiglu.py, cross_entropy.py) use pair_tile and store_both, too. A tile
comes as its even and its odd rows: two numbers of neighboring rows become two bytes of one word, so words are
transposed and not bytes, which takes a third of the instructions. So the kernels take an even number of rows.

Trap: fp8 numbers do not exist in these kernels as Triton's fp8. On Hopper, a kernel that stores such numbers
as they are and transposed may store wrong ones, a fault of the ptxas that comes with Triton
(triton-lang/triton issue 11111): 37 % of the transposed values with SwiGLU in the same kernel (LOG.md). So
training/optimization/precision.py compares each kernel with plain arithmetic at the start.

M rows · N columns
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

TILE_M, TILE_N, NUM_WARPS = 256, 64, 8  # 256 rows make a piece of two cache lines of a transposed row
IS_E4M3 = {torch.float8_e4m3fn: True, torch.float8_e5m2: False}


@triton.jit
def _four_bytes(x, E4M3: tl.constexpr):
    """x (fp32), saturated and rounded to fp8; four neighbors of a row at a time."""
    if E4M3:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;"
        " cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _two_bytes(even, odd, E4M3: tl.constexpr):
    """The same of two neighbors of a column, as one word whose first byte is even's."""
    if E4M3:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [even, odd], dtype=tl.uint16,
            is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [even, odd], dtype=tl.uint16,
        is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def one_byte(x, E4M3: tl.constexpr):
    """x (fp32) as an fp8 byte."""
    return (_two_bytes(x, x, E4M3) & 0xFF).to(tl.uint8)


@triton.jit
def pair_tile(M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The pairs of rows and the columns of this program's tile, and which of them are inside of (M, N)."""
    pair = (tl.program_id(1) * (TILE_M // 2) + tl.arange(0, TILE_M // 2)).to(tl.int64)
    n = (tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)).to(tl.int64)
    return pair, n, (pair < M // 2)[:, None] & (n < N)[None, :]


@triton.jit
def store_both(y, yt, even, odd, pair, n, M, N, inside, E4M3: tl.constexpr):
    """A tile's even and odd rows (fp32) in fp8: to y (M, N), bytes, and to its transpose yt (N, M / 2), words
    of two."""
    store_rows(y, even, odd, pair, n, N, inside, E4M3)
    store_transposed(yt, even, odd, pair, n, M, inside, E4M3)


@triton.jit
def store_rows(y, even, odd, pair, n, N, inside, E4M3: tl.constexpr):
    """The first half of store_both."""
    at = y + pair[:, None] * 2 * N + n[None, :]
    tl.store(at, _four_bytes(even, E4M3), mask=inside)
    tl.store(at + N, _four_bytes(odd, E4M3), mask=inside)


@triton.jit
def store_transposed(yt, even, odd, pair, n, M, inside, E4M3: tl.constexpr):
    """The second half of store_both."""
    words = tl.trans(_two_bytes(even, odd, E4M3))
    tl.store(yt + n[:, None] * (M // 2) + pair[None, :], words, mask=tl.trans(inside))


# a scale may be one of many in a tensor; its alignment is of no use, and each one would be compiled anew
@triton.jit(do_not_specialize_on_alignment=["scale"])
def _quantize(
    x, scale, y, yt, M, N, E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    pair, n, inside = pair_tile(M, N, TILE_M, TILE_N)
    at, factor = x + pair[:, None] * 2 * N + n[None, :], tl.load(scale)
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
    odd = tl.load(at + N, mask=inside, other=0.0).to(tl.float32) * factor
    store_both(y, yt, even, odd, pair, n, M, N, inside, E4M3)


@triton.jit(do_not_specialize_on_alignment=["parts"])
def _amax(x, parts, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(parts + tl.program_id(0), tl.max(tl.abs(values), 0))


def triton_amax(x: torch.Tensor, parts: torch.Tensor, part: int) -> None:
    """Writes the largest magnitude of each `part` numbers of x, contiguous, to parts (fp32)."""
    _amax[(len(parts),)](x, parts, x.numel(), BLOCK=part, num_warps=8)


def triton_quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, out=None):
    """x (M, N) times scale, saturated -> fp8 (M, N) and its transpose (N, M), both contiguous, in `out` if it
    is given."""
    M, N = x.shape
    if M % 2 and out is None:  # an evaluation may have an odd number of tokens: zeros make the last pair
        y, yt = triton_quantize(F.pad(x, (0, 0, 0, 1)), scale, dtype)
        return y[:M], yt[:, :M].contiguous()
    y, yt = out or empty_pair(x, dtype)
    _quantize[tiles(M, N)](x, scale, *as_words(y, yt), M, N, **launch(dtype))
    return y, yt


def empty_pair(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for x (M, N) in another dtype, and for its transpose."""
    M, N = x.shape
    return x.new_empty(M, N, dtype=dtype), x.new_empty(N, M, dtype=dtype)


def as_words(y: torch.Tensor, yt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y (M, N) and its transpose yt (N, M) as store_both takes them."""
    if y.shape[0] % 2:
        raise ValueError(f"the fp8 kernels take an even number of rows, but got {tuple(y.shape)}")
    return y.view(torch.uint8), yt.view(torch.uint16)


def tiles(M: int, N: int) -> tuple[int, int]:
    """The grid of programs that handle a tile each."""
    return triton.cdiv(N, TILE_N), triton.cdiv(M, TILE_M)


def launch(dtype: torch.dtype) -> dict:
    """The constants of a kernel that writes dtype in tiles."""
    return {"E4M3": IS_E4M3[dtype], "TILE_M": TILE_M, "TILE_N": TILE_N, "num_warps": NUM_WARPS}
