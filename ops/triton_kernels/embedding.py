"""ops/embedding.py on a GPU: its gradient, added to the sum in a fixed order.

N tokens · C width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

EMBEDDING_BLOCK, EMBEDDING_ROWS = 512, 16  # columns of a program, rows that it adds at a time


@triton.jit
def _add_embedding_gradient(sorted_ids, order, dy, total, N, C, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    first = tl.program_id(0)
    token = tl.load(sorted_ids + first)
    before = tl.load(sorted_ids + tl.maximum(first - 1, 0))
    if (first == 0) | (before != token):  # else another program has this token
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        sums = tl.zeros((BLOCK,), tl.float32)
        i = first
        more = 1
        while more > 0:
            at = i + tl.arange(0, ROWS)
            same = tl.load(sorted_ids + at, mask=at < N, other=-1) == token
            rows = tl.load(order + at, mask=same, other=0)[:, None]
            part = tl.load(dy + rows * C + column, mask=same[:, None] & (column < C), other=0.0)
            sums += tl.sum(part.to(tl.float32), 0)
            more = tl.min(same.to(tl.int32), 0)  # 0 if these were the last
            i += ROWS
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = total + token * C + column
        tl.store(at, tl.load(at, mask=column < C, other=0.0) + sums, mask=column < C)


def triton_add_embedding_gradient(ids: torch.Tensor, dy: torch.Tensor, total: torch.Tensor) -> None:
    """total (V, C) fp32, row ids[n], += dy[n] (N, C), in the order of n. Only rows that occur are touched."""
    N, C = dy.shape
    sorted_ids, order = ids.sort(stable=True)
    grid = N, triton.cdiv(C, EMBEDDING_BLOCK)
    _add_embedding_gradient[grid](
        sorted_ids, order, dy, total, N, C, BLOCK=EMBEDDING_BLOCK, ROWS=EMBEDDING_ROWS
    )
