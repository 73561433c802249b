"""Mixes several splits into one, by weight. The source of sample s, and its number within that source, follow
from (seed, s) alone, so a resume needs no stored state and any number of ranks sees the same samples.

The schedule consists of blocks of BLOCK samples. Each block has every source's share, in an order of its own;
a fraction of a sample that is left over is carried to the next block. Within a source, samples have the same
order as without a mixture.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from training.batches.windows import Split, Windows, permute
from training.configuration.seeds import MIXTURE_BLOCK, stream_seed

BLOCK = 256  # samples; an iteration with more samples has nearly the shares asked for


class Mixture(Split):
    """Several splits as one. sources: {name: (weight, split)}; the weights add up to 1."""

    def __init__(self, sources: dict[str, tuple[Fraction, Windows]]):
        self.sources = sources
        self.splits = [split for _, split in sources.values()]
        self.shares = []  # of each source but the last: its share of what the sources before it leave
        left = Fraction(1)
        for weight, _ in list(sources.values())[:-1]:
            self.shares.append(weight / left)
            left -= weight

    @property
    def by_source(self) -> dict[str, tuple[Fraction, Windows]]:
        return self.sources

    @property
    def count(self) -> int:
        return sum(split.count for split in self.splits)

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` each source has, at the end of a block: its weight times `samples`,
        up to the effect of rounding each share down."""
        counts = []
        for share in self.shares:  # exact integers: floats would lose samples after 2^53
            counts.append(samples * share.numerator // share.denominator)
            samples -= counts[-1]
        return np.array([*counts, samples])

    def schedule(self, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(source indices, numbers within each source) of the samples with these numbers."""
        blocks, inside = np.divmod(numbers, BLOCK)
        sources, own = np.empty_like(numbers), np.empty_like(numbers)
        for block in np.unique(blocks):
            here = blocks == block
            block_sources, block_own = self._block(int(block), seed)
            sources[here], own[here] = block_sources[inside[here]], block_own[inside[here]]
        return sources, own

    def _block(self, block: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        before, after = self.counts(block * BLOCK), self.counts((block + 1) * BLOCK)
        slots = permute(np.arange(BLOCK), BLOCK, stream_seed(seed, MIXTURE_BLOCK, block))
        sources = np.searchsorted(np.cumsum(after - before), slots, side="right")
        own = np.empty_like(slots)
        for source, (first, end) in enumerate(zip(before, after, strict=True)):
            own[sources == source] = np.arange(first, end)
        return sources, own

    def samples(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        sources, own = self.schedule(numbers, seed)
        rows = [self.splits[source].samples(own[sources == source], seed) for source in np.unique(sources)]
        order = np.argsort(sources, kind="stable")  # where each row belongs; rows come source by source
        mixed = np.empty_like(rows[0], shape=(len(numbers), rows[0].shape[1]))
        mixed[order] = np.concatenate(rows)
        return mixed
