"""Rows of bf16 numbers as words: integers of 32 bits that hold two neighbors, the first one in the low half.

A kernel that reads, computes and writes words moves half as many of them. float_bits.py takes them apart and
arithmetic.py makes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORD_BYTES = 4
SIGNS, MAGNITUDES = tl.constexpr(-0x7FFF8000), tl.constexpr(0x7FFF7FFF)


@triton.jit
def along_row(magnitudes, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of each BLOCK numbers of a row: (WORDS), the larger one of each two, integers ->
    (2 WORDS / BLOCK, 1)."""
    return tl.max(magnitudes.reshape(2 * WORDS // BLOCK, BLOCK // 2), 1)[:, None]


@triton.jit
def to_row(scales, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """(2 WORDS / BLOCK, 1) -> (WORDS): to every word the scale of its block."""
    return tl.broadcast_to(scales, 2 * WORDS // BLOCK, BLOCK // 2).reshape(WORDS)


def as_words(x: torch.Tensor) -> torch.Tensor:
    """x (M, N), bf16 -> (M, N / 2), int32. A part of a larger tensor may begin between two words."""
    return (x if x.data_ptr() % WORD_BYTES == 0 else x.clone()).view(torch.int32)


def empty_words(words: torch.Tensor) -> torch.Tensor:
    """As many words, contiguous."""
    return torch.empty(words.shape, dtype=torch.int32, device=words.device)
