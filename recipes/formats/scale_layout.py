"""The order in which Blackwell's matmuls read the scales of blocks.

    tile             128 rows x 4 columns of scales, 512 bytes; a row of tiles after another
    inside of it     byte 16 (row % 32) + 4 (row // 32) + column

Scales that fill no tile are padded with zeros. torch calls it SWIZZLE_32_4_4, torchao's to_blocked() makes
it. Source: cuBLAS' documentation, "1D Block Scaling Factors Layout".

R rows · C columns of scales
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS, COLUMNS = 128, 4  # of a tile


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """How many tiles such a matrix of scales has from top to bottom, and from left to right."""
    return -(-rows // ROWS), -(-columns // COLUMNS)


def to_tiles(scales: torch.Tensor) -> torch.Tensor:
    """scales (R, C), one byte each -> uint8, flat."""
    (R, C), (down, across) = scales.shape, tiles(*scales.shape)
    padded = F.pad(scales.view(torch.uint8), (0, COLUMNS * across - C, 0, ROWS * down - R))
    return padded.view(down, 4, 32, across, COLUMNS).permute(0, 3, 2, 1, 4).flatten()


def from_tiles(ordered: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """What to_tiles() made of scales (R, C) -> (R, C), uint8."""
    down, across = tiles(rows, columns)
    padded = ordered.view(down, across, 32, 4, COLUMNS).permute(0, 3, 2, 1, 4)
    return padded.reshape(ROWS * down, COLUMNS * across)[:rows, :columns]
