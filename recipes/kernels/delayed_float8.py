"""recipes/fp8_delayed.py on a GPU: casts by the scale of the past that find the amax for the next one.

Every kernel takes the state of its tensor as two pointers. `scale` is 0 if there is no history; then the
scale is made of `found`, the tensor's own amax, which is known or which a pass before has found. That pass
starts few programs, which walk over the tensor, or end at once if there is a history.

`amax` and `found` are written by atomic maxima of bits: integers, in which magnitudes have their order, and
nan is the largest. Their result does not depend on the order of programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ops.triton_kernels.float8 import as_words, empty_pair, launch, pair_tile, store_both, tiles
from ops.triton_kernels.launch import walking_programs
from recipes.kernels.float_bits import larger, largest, magnitude_bits

WALKED, WALKING_PROGRAMS = 8192, 4  # numbers that a program reads at a time; programs a multiprocessor
SMALLEST_AMAX = tl.constexpr(1e-12)  # as in ops/float8.py


@triton.jit
def used_scale(scale, found, inverse, E4M3: tl.constexpr):
    """What the tensor is multiplied by. Writes its inverse."""
    factor = tl.load(scale)
    if factor == 0:
        own = tl.load(found)
        own = tl.where(own < SMALLEST_AMAX, SMALLEST_AMAX, own)
        factor = tl.div_rn(448.0 if E4M3 else 57344.0, own)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(inverse, tl.div_rn(1.0, factor))
    return factor


@triton.jit
def keep_amax(amax, even, odd):
    """Of a tile's rows, into amax, whose bits are integers."""
    tile = largest(largest(larger(tl.abs(even), tl.abs(odd)), 1), 0)
    tl.atomic_max(amax, magnitude_bits(tile), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["scale"])
def _amax_without_history(x, scale, found, n, BLOCK: tl.constexpr):
    if tl.load(scale) == 0:
        bits = tl.zeros((BLOCK,), tl.int32)
        for block in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(values))
        tl.atomic_max(found, tl.max(bits, 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["scale", "found", "amax", "inverse"])
def _delayed_cast(
    x, scale, found, amax, inverse, y, yt, M, N,
    KNOWN: tl.constexpr, E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    factor = used_scale(scale, found, inverse, E4M3)
    pair, n, inside = pair_tile(M, N, TILE_M, TILE_N)
    at = x + pair[:, None] * 2 * N + n[None, :]
    even = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    if not KNOWN:
        keep_amax(amax, even, odd)
    elif (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.atomic_max(amax, magnitude_bits(tl.load(found)), sem="relaxed")
    store_both(y, yt, even * factor, odd * factor, pair, n, M, N, inside, E4M3)


def triton_delayed_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    known_amax: torch.Tensor | None,
    out: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (M, N), contiguous -> fp8 (M, N), its transpose (N, M), the inverse of the scale, in `out` if it is
    given; amax becomes the larger one of itself and the amax of x."""
    M, N = x.shape
    if M % 2 and out is None:  # an evaluation may have an odd number of tokens: zeros make the last pair
        padded = F.pad(x, (0, 0, 0, 1))
        y, yt, inverse = triton_delayed_quantize(padded, scale, amax, dtype, known_amax)
        return y[:M], yt[:, :M].contiguous(), inverse
    y, yt, inverse = out or (*empty_pair(x, dtype), torch.empty_like(scale))
    if known_amax is None:
        found = torch.zeros_like(scale)
        grid = (walkers(x.device),)
        _amax_without_history[grid](x, scale, integer(found), x.numel(), BLOCK=WALKED, num_warps=8)
    else:
        found = known_amax.amax().float()
    _delayed_cast[tiles(M, N)](
        x, scale, found, integer(amax), inverse, *as_words(y, yt), M, N,
        KNOWN=known_amax is not None, **launch(dtype),
    )  # fmt: skip
    return y, yt, inverse


def walkers(device: torch.device) -> int:
    """How many programs a pass for the amax starts."""
    return walking_programs(device, WALKING_PROGRAMS)


def integer(scalar: torch.Tensor) -> torch.Tensor:
    """The bits of an fp32 scalar, in its memory."""
    return scalar.view(torch.int32)
