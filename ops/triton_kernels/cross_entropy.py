"""ops/cross_entropy.py on a GPU: losses, and the gradient of the logits, in their place or in fp8.

N tokens · V vocabulary
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

LOSS_BLOCK = 4096


@triton.jit
def _cross_entropy(
    logits, targets, losses, log_sums, V, GRADIENT: tl.constexpr, LOG_SUMS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    highest = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(x - new), 0)
        highest = new
    log_sum = highest + tl.log(total)
    counted = target >= 0
    picked = tl.load(logits + target, mask=counted, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(counted, log_sum - picked, 0.0))
    if LOG_SUMS:
        tl.store(log_sums + row, log_sum)
    if GRADIENT:
        tl.debug_barrier()  # the target's logit has been read by all before it is overwritten
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < V, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - log_sum)
            p = tl.where(column == target, p - 1.0, p)
            tl.store(logits + column, tl.where(counted, p, 0.0), mask=column < V)


@triton.jit
def _cross_entropy_float8(
    logits,
    targets,
    log_sums,
    scale,
    y,
    yt,
    N,
    V,
    W,
    limit,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    tile, first_column = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * TILE_N
    word, column = tl.arange(0, TILE_M // 4), tl.arange(0, TILE_N)
    corner = tile * TILE_M * V + first_column
    columns_inside = (first_column + column < V)[None, :]
    factor = tl.load(scale)
    x = ()  # type: tuple[tl.tensor, ...]
    target = ()  # type: tuple[tl.tensor, ...]
    log_sum = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(4):  # all loads before the first store, which none of them would overtake
        row = word * 4 + i
        token = tile * TILE_M + row
        inside = (token < N)[:, None] & columns_inside
        x += (tl.load(logits + corner + (row[:, None] * V + column[None, :]), mask=inside, other=0.0),)
        target += (tl.load(targets + token, mask=token < N, other=-1)[:, None],)
        log_sum += (tl.load(log_sums + token, mask=token < N, other=0.0)[:, None],)
    words = tl.zeros((TILE_M // 4, TILE_N), tl.uint32)
    for i in tl.static_range(4):
        row = word * 4 + i
        inside = (tile * TILE_M + row < N)[:, None] & columns_inside
        p = tl.exp(x[i].to(tl.float32) - log_sum[i])
        p = tl.where((first_column + column)[None, :] == target[i], p - 1.0, p)
        p = tl.where(target[i] >= 0, p, 0.0).to(
            logits.dtype.element_ty
        )  # rounded as _cross_entropy rounds it
        bits = float8_bytes(p.to(tl.float32), factor, limit, DTYPE)
        tl.store(y + corner + (row[:, None] * V + column[None, :]), bits, mask=inside)
        words |= bits.to(tl.uint32) << (8 * i)
    store_transposed(yt, words, tile * (TILE_M // 4), first_column, W, V)


def triton_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, gradient: bool, log_sums: torch.Tensor | None = None
) -> torch.Tensor:
    """Losses (N,) fp32 of logits (N, V), 0 for a negative target; with gradient=True the logits become
    softmax - one_hot, or 0: in place, so there is no second (N, V) tensor. The logarithms of the softmax's
    sums go to log_sums (N,) fp32, if it is given."""
    N, V = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    block = min(LOSS_BLOCK, triton.next_power_of_2(V))
    _cross_entropy[(N,)](
        logits,
        targets,
        losses,
        log_sums,
        V,
        GRADIENT=gradient,
        LOG_SUMS=log_sums is not None,
        BLOCK=block,
        num_warps=8,
    )
    return losses


def triton_cross_entropy_float8(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """triton_cross_entropy's losses, and its gradient times scale in fp8, (N, V) and (V, N). The gradient in
    bf16 is never written: three passes over the largest tensor of a step instead of five."""
    N, V = logits.shape
    assert N % 4 == 0, N  # the fp8 matmul of the weight gradient needs a multiple of 16
    log_sums = torch.empty(N, dtype=torch.float32, device=logits.device)
    losses = triton_cross_entropy(logits, targets, False, log_sums)
    y, yt = empty_pair(logits, dtype)
    _cross_entropy_float8[triton.cdiv(V, TILE_N), triton.cdiv(N, TILE_M)](
        logits,
        targets,
        log_sums,
        scale,
        as_bytes(y),
        as_words(yt),
        N,
        V,
        N // 4,
        torch.finfo(dtype).max,
        DTYPE=TRITON_DTYPES[dtype],
        TILE_M=TILE_M,
        TILE_N=TILE_N,
        num_warps=NUM_WARPS,
    )
    return losses, y, yt
