"""ops/cross_entropy.py on a GPU: losses, and the gradient of the logits, in their place or in fp8.

N tokens · V vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.float8 import as_bytes, empty_pair, float8_bytes, launch, store_both, tile, tiles

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
    logits, targets, log_sums, scale, y, yt, N, V, LIMIT: tl.constexpr, FORMAT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    token, column, inside = tile(N, V, TILE_M, TILE_N)
    x = tl.load(logits + token[:, None] * V + column[None, :], mask=inside, other=0.0).to(tl.float32)
    target = tl.load(targets + token, mask=token < N, other=-1)[:, None]
    p = tl.exp(x - tl.load(log_sums + token, mask=token < N, other=0.0)[:, None])
    p = tl.where(column[None, :] == target, p - 1.0, p)
    # rounded as _cross_entropy rounds it, so that both forms give the same numbers
    p = tl.where(target >= 0, p, 0.0).to(logits.dtype.element_ty).to(tl.float32)
    bits = float8_bytes(p * tl.load(scale), LIMIT, FORMAT)
    store_both(y, yt, bits, token, column, N, V, inside)


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
    log_sums = torch.empty(N, dtype=torch.float32, device=logits.device)
    losses = triton_cross_entropy(logits, targets, False, log_sums)
    y, yt = empty_pair(logits, dtype)
    _cross_entropy_float8[tiles(N, V)](
        logits, targets, log_sums, scale, as_bytes(y), as_bytes(yt), N, V, **launch(dtype)
    )
    return losses, y, yt
