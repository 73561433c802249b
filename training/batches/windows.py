"""Defines which tokens a sample is: windows of block_size tokens that do not overlap, in a permuted order,
each once per epoch. A sample is a function of (seed, epoch, position) and of nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction

import numpy as np
import torch

from ops.documents import plain_ids
from training.batches.document_starts import DocumentStarts
from training.batches.token_files import TokenFiles
from training.configuration.seeds import EPOCH, stream_seed

ROUNDS = 6  # Feistel rounds; four already look random (Luby and Rackoff 1988), two more cost nothing


def permute(index: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Permutes each index by a permutation of range(n) drawn from seed; needs no memory proportional to n.

    A Feistel network on the smallest even number of bits that can hold n, applied again until the result is
    below n (Black and Rogaway 2002, sec. 4).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    value = _feistel(index.astype(np.uint64), half, mask, keys)
    while (outside := value >= n).any():
        value[outside] = _feistel(value[outside], half, mask, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: int, mask: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = value >> np.uint64(half), value & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, Knuth's multiplier
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << np.uint64(half)) | right


class Split(ABC):
    """Samples, read by their numbers."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many there are in an epoch; in a mixture, in one epoch of each source."""

    @property
    @abstractmethod
    def by_source(self) -> dict[str, tuple[Fraction, Windows]]:
        """{source: (weight, its windows)}; only a Mixture has several sources."""

    @abstractmethod
    def samples(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The samples with these numbers (N,) as (N, T + 1) token ids, int64."""


class Windows(Split):
    """A split of one dataset: `count` token windows per epoch, in a permuted order, each once."""

    @abstractmethod
    def read(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> np.ndarray:
        """The windows (len(indices), T + 1) as int64, cut as in these epochs; ids as in
        inputs_and_targets."""

    @property
    def by_source(self) -> dict[str, tuple[Fraction, Windows]]:
        return {"": (Fraction(1), self)}

    def places(self, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(window indices, epochs) of the samples with these numbers; each window comes once per epoch."""
        epochs, inside = np.divmod(numbers, self.count)
        indices = np.empty_like(inside)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(inside[here], self.count, stream_seed(seed, EPOCH, int(epoch)))
        return indices, epochs

    def samples(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        return self.read(*self.places(numbers, seed))


class StreamWindows(Windows):
    """packing='stream': the tokens are cut anywhere into windows. A window is block_size inputs and the one
    token after them. documents: marks their first tokens, for doc_masking."""

    def __init__(self, tokens: TokenFiles, block_size: int, documents: DocumentStarts | None = None):
        self.tokens, self.block_size, self.documents = tokens, block_size, documents

    @property
    def count(self) -> int:
        return (self.tokens.total - 1) // self.block_size

    def read(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> np.ndarray:
        starts = indices * self.block_size + epoch_offset(
            np.broadcast_to(epochs, indices.shape), self.block_size
        )
        self.tokens.prefetch(starts, self.block_size + 1)
        rows = np.stack([self.tokens.read(int(s), self.block_size + 1) for s in starts]).astype(np.int64)
        if self.documents is not None:
            for row, start in zip(rows, starts, strict=True):
                self.documents.mark(row, int(start))
        return rows


def epoch_offset(epoch: np.ndarray, block_size: int) -> np.ndarray:
    """Where an epoch's first window starts; the tokens wrap around. Each epoch cuts them at other places, so
    that a token is not always at the same place of a window, after the same context: with the same cuts in
    all epochs, small data is memorized sooner (LOG.md). Golden-ratio steps spread the cuts; epoch 0 starts at
    the first token.
    """
    return (epoch * int(block_size * 0.6180339887498949)) % block_size


NO_TARGET = -100  # the default of ignore_index in torch.nn.functional.cross_entropy


def inputs_and_targets(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y (..., T) of rows (..., T + 1); y is x shifted by one. A negative id is padding, the bitwise
    complement of the end-of-text id (training/batches/packing.py): as a target, it is -100, which torch's
    losses do not count either; as an input, it becomes the end-of-text id. With doc_masking, the first token
    of each document is marked in x (ops/documents.py). As a target it is not: it is predicted from the last
    token of the document before."""
    x, y = tokens[..., :-1], tokens[..., 1:]
    return torch.where(x < 0, ~x, x), torch.where(y < 0, NO_TARGET, plain_ids(y))
