"""ops/cross_entropy.py on a GPU: losses, and the gradient of the logits, in their place or in fp8.

N tokens · V vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.arithmetic import LOG2_E, exp2, rounded
from ops.triton_kernels.float8 import (
    IS_E4M3,
    as_words,
    empty_pair,
    launch,
    one_byte,
    pair_tile,
    store_both,
    tiles,
)

# A thread reads VECTOR neighbors at once, PARTS times before it computes: so many loads are on their way.
VECTOR, PARTS = 8, 4
# A program reads its row twice. The second time it comes from the L2 cache, if few rows are at work: so a
# program has 16 warps, and 32 for a long row. Measured on an H100 at 32,000 to 151,936 (LOG.md).
LONG_ROW = 65_536
TARGETS = 128  # of a program that handles nothing else


@triton.jit
def _row_part(logits, start, part: tl.constexpr, V, THREADS: tl.constexpr, VECTOR: tl.constexpr):
    """Columns of a row, (THREADS, VECTOR), so that a thread has VECTOR neighbors and a sum over them is its
    own; and which of them exist."""
    column = start + part * THREADS * VECTOR + tl.arange(0, THREADS)[:, None] * VECTOR
    column += tl.arange(0, VECTOR)[None, :]
    return column, column < V


@triton.jit
def _probability(x, log2_sum):
    """softmax, fp32. log2_sum = inf: 0."""
    return exp2(x.to(tl.float32) * LOG2_E - log2_sum)


@triton.jit
def _cross_entropy(
    logits, targets, losses, log2_sums, V, GRADIENT: tl.constexpr, LOG_SUMS: tl.constexpr,
    THREADS: tl.constexpr, VECTOR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A row a program. Each thread has its own maximum and sum, in powers of 2; they meet at the end."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    highest = tl.full((THREADS,), -1e30, tl.float32)  # not -inf, whose differences are NaN
    total = tl.zeros((THREADS,), tl.float32)
    for start in range(0, V, THREADS * VECTOR * PARTS):
        new = highest
        parts = ()
        for part in tl.static_range(PARTS):
            column, inside = _row_part(logits, start, part, V, THREADS, VECTOR)
            x = tl.load(logits + column, mask=inside, other=-float("inf"), eviction_policy="evict_last")
            parts += (x.to(tl.float32),)  # type: ignore[assignment]  # Triton unrolls the loop
        for part in tl.static_range(PARTS):
            new = tl.maximum(new, tl.max(parts[part], 1) * LOG2_E)
        total *= exp2(highest - new)
        for part in tl.static_range(PARTS):
            total += tl.sum(exp2(parts[part] * LOG2_E - new[:, None]), 1)
        highest = new
    top = tl.max(highest, 0)
    log2_sum = top + tl.log2(tl.sum(total * exp2(highest - top), 0))
    target = tl.load(targets + row)
    counted = target >= 0
    picked = tl.load(logits + target, mask=counted, other=0.0)
    tl.store(losses + row, tl.where(counted, log2_sum / LOG2_E - picked.to(tl.float32), 0.0))
    log2_sum = tl.where(counted, log2_sum, float("inf"))
    if LOG_SUMS:
        tl.store(log2_sums + row, log2_sum)
    if GRADIENT:
        tl.debug_barrier()  # the target's logit has been read by all before it is overwritten
        STEP: tl.constexpr = THREADS * VECTOR * PARTS
        for start in range(0, V, STEP):
            last = (V - 1) // STEP * STEP - start  # from the end, which the cache had last
            for part in tl.static_range(PARTS):
                column, inside = _row_part(logits, last, part, V, THREADS, VECTOR)
                x = tl.load(logits + column, mask=inside, other=0.0)
                p = _probability(x, log2_sum).to(x.dtype)
                tl.store(logits + column, p, mask=inside, eviction_policy="evict_first")
        tl.debug_barrier()
        # the one-hot vector by itself: one comparison a row and not one a number
        one_less = _probability(picked, log2_sum) - 1.0
        tl.store(logits + target, one_less.to(logits.dtype.element_ty), mask=counted)


@triton.jit
def _cross_entropy_float8(
    logits, log2_sums, scale, y, yt, N, V, E4M3: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    """All but the one-hot vector. Rounded as _cross_entropy rounds, so both forms give the same numbers."""
    pair, column, inside = pair_tile(N, V, TILE_M, TILE_N)
    at, factor, exists = logits + pair[:, None] * 2 * V + column[None, :], tl.load(scale), pair < N // 2
    even, odd = tl.load(at, mask=inside, other=0.0), tl.load(at + V, mask=inside, other=0.0)
    even_sum = tl.load(log2_sums + 2 * pair, mask=exists, other=0.0)[:, None]
    odd_sum = tl.load(log2_sums + 2 * pair + 1, mask=exists, other=0.0)[:, None]
    even = rounded(_probability(even, even_sum), even.dtype) * factor
    odd = rounded(_probability(odd, odd_sum), odd.dtype) * factor
    store_both(y, yt, even, odd, pair, column, N, V, inside, E4M3)


@triton.jit
def _subtract_one_hot(
    logits, targets, log2_sums, scale, y, yt, N, V, E4M3: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The targets' numbers in y and yt (V, N), bytes, over what _cross_entropy_float8 wrote there."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + token, mask=token < N, other=-1)
    counted = target >= 0
    x = tl.load(logits + token * V + target, mask=counted, other=0.0)
    p = _probability(x, tl.load(log2_sums + token, mask=counted, other=0.0)) - 1.0
    bits = one_byte(rounded(p, x.dtype) * tl.load(scale), E4M3)
    tl.store(y + token * V + target, bits, mask=counted)
    tl.store(yt + target * N + token, bits, mask=counted)


def triton_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, gradient: bool, log2_sums: torch.Tensor | None = None
) -> torch.Tensor:
    """Losses (N,) fp32 of logits (N, V), 0 for a negative target; with gradient=True the logits become
    softmax - one_hot, or 0: in place, so there is no second (N, V) tensor. The logarithms to base 2 of the
    softmax's sums go to log2_sums (N,) fp32, if it is given; inf for a negative target."""
    N, V = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    warps = 16 if V <= LONG_ROW else 32
    _cross_entropy[(N,)](
        logits, targets, losses, log2_sums, V, GRADIENT=gradient, LOG_SUMS=log2_sums is not None,
        THREADS=32 * warps, VECTOR=VECTOR, PARTS=PARTS, num_warps=warps,
    )  # fmt: skip
    return losses


def triton_cross_entropy_float8(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """triton_cross_entropy's losses, and its gradient times scale in fp8, (N, V) and (V, N). The gradient in
    bf16 is never written: three passes over the largest tensor of a step instead of five."""
    N, V = logits.shape
    log2_sums = torch.empty(N, dtype=torch.float32, device=logits.device)
    losses = triton_cross_entropy(logits, targets, False, log2_sums)
    y, yt = empty_pair(logits, dtype)
    _cross_entropy_float8[tiles(N, V)](logits, log2_sums, scale, *as_words(y, yt), N, V, **launch(dtype))
    _subtract_one_hot[(triton.cdiv(N, TARGETS),)](
        logits, targets, log2_sums, scale, y.view(torch.uint8), yt.view(torch.uint8), N, V,
        E4M3=IS_E4M3[dtype], BLOCK=TARGETS, num_warps=1,
    )  # fmt: skip
    return losses, y, yt
