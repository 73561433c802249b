"""ops/cross_entropy.py on a GPU: losses, and in place of the logits their gradient.

N tokens · V vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOSS_BLOCK = 4096


@triton.jit
def _cross_entropy(logits, targets, losses, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
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
    if GRADIENT:
        tl.debug_barrier()  # the target's logit has been read by all before it is overwritten
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < V, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - log_sum)
            p = tl.where(column == target, p - 1.0, p)
            tl.store(logits + column, tl.where(counted, p, 0.0), mask=column < V)


def triton_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Losses (N,) fp32 of logits (N, V), 0 for a negative target; with gradient=True the logits become
    softmax - one_hot, or 0: in place, so there is no second (N, V) tensor."""
    N, V = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    block = min(LOSS_BLOCK, triton.next_power_of_2(V))
    _cross_entropy[(N,)](logits, targets, losses, V, GRADIENT=gradient, BLOCK=block, num_warps=8)
    return losses
