"""Divides a matrix into blocks that have one scale each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Block = tuple[int, int]  # rows, columns


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """x (M, K) -> the largest magnitude of each block, fp32 (M / rows, K / columns). One with nan has nan.
    ValueError: the block does not divide the matrix."""
    return _divided(x, block).abs().amax((1, 3)).float()


def spread(scales: torch.Tensor, block: Block) -> torch.Tensor:
    """Scales (M / rows, K / columns) -> (M, K): to every element that of its block."""
    rows, columns = block
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def number_of_blocks(x: torch.Tensor, block: Sequence[int]) -> tuple[int, int]:
    """M / rows and K / columns. ValueError: the block does not divide the matrix."""
    if x.ndim != 2:
        raise ValueError(
            f"blocks divide a matrix, but the tensor has shape {tuple(x.shape)}; flatten it first"
        )
    (M, K), (rows, columns) = x.shape, block
    if M == 0 or K == 0 or M % rows or K % columns:
        raise ValueError(
            f"a matrix of {M} x {K} cannot be divided into blocks of {rows} x {columns}; "
            f"its height must be a multiple of {rows}, its width one of {columns}, and neither may be 0"
        )
    return M // rows, K // columns


def _divided(x: torch.Tensor, block: Block) -> torch.Tensor:
    """(M, K) -> (M / rows, rows, K / columns, columns)."""
    high, wide = number_of_blocks(x, block)
    return x.reshape(high, block[0], wide, block[1])
