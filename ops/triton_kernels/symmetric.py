"""Batched products that are symmetric: blocks on and below the diagonal are computed, and stored twice.

B matrices · M rows · K columns
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# on an H100, of 9 choices: bmm takes 1.27 times as long for K = M = 2048 and for K = 6144
BLOCK, BLOCK_K, WARPS, STAGES = 128, 64, 4, 4


@triton.jit
def _symmetric_product(
    x, y, add, out, M, K, x_batch, x_row, x_k, y_batch, y_row, y_k, alpha, beta, diagonal,
    ADD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # block (i, j), j <= i, by its place in 00 10 11 20 21 22 ..
    place = tl.program_id(0)
    i = ((tl.sqrt(8.0 * place + 1) - 1) / 2).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= place).to(tl.int32) - (i * (i + 1) // 2 > place).to(tl.int32)  # rounding
    j = place - i * (i + 1) // 2
    matrix = tl.program_id(1).to(tl.int64)
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    # rows beyond the end repeat others: they are not stored
    of_x = x + matrix * x_batch + (row % M)[:, None] * x_row + k[None, :] * x_k
    of_y = y + matrix * y_batch + (column % M)[None, :] * y_row + k[:, None] * y_k
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(of_x, mask=(start + k)[None, :] < K, other=0.0)
        right = tl.load(of_y, mask=(start + k)[:, None] < K, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        of_x += BLOCK_K * x_k
        of_y += BLOCK_K * y_k
    at = matrix * M * M + row[:, None] * M + column[None, :]
    inside = (row[:, None] < M) & (column[None, :] < M)
    total *= alpha
    if ADD:
        total += beta * tl.load(add + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.where(row[:, None] == column[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    if i > j:
        mirrored = matrix * M * M + column[:, None] * M + row[None, :]
        tl.store(out + mirrored, tl.trans(result), mask=(column[:, None] < M) & (row[None, :] < M))


def triton_symmetric_product(
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float,
    add: torch.Tensor | None,
    beta: float,
    diagonal: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """alpha x y^T + beta add + diagonal I, (B, M, M) in dtype. x and y (B, M, K) in any order of dimensions,
    add (B, M, M) contiguous."""
    B, M, K = x.shape
    assert y.shape == x.shape and (add is None or (add.is_contiguous() and add.shape == (B, M, M)))
    out = x.new_empty(B, M, M, dtype=dtype)
    blocks = -(-M // BLOCK)
    _symmetric_product[(blocks * (blocks + 1) // 2, B)](
        x, y, x if add is None else add, out, M, K, *x.stride(), *y.stride(), alpha, beta, diagonal,
        ADD=add is not None, BLOCK=BLOCK, BLOCK_K=BLOCK_K, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out
