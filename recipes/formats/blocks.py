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
    rows, columns = block
    if x.ndim != 2 or not x.numel() or x.shape[0] % rows or x.shape[1] % columns:
        shape = " x ".join(map(str, x.shape))
        raise ValueError(f"{shape} cannot be divided into blocks of {rows} x {columns}")
    return x.shape[0] // rows, x.shape[1] // columns


def _divided(x: torch.Tensor, block: Block) -> torch.Tensor:
    """(M, K) -> (M / rows, rows, K / columns, columns)."""
    high, wide = number_of_blocks(x, block)
    return x.reshape(high, block[0], wide, block[1])
