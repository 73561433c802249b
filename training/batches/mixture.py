"""Several splits as one, sampled by weight. Which source sample s comes from, and which of the source's own
samples it is, follows from (seed, s) alone, so a resume needs no state and any number of ranks sees the same.

The schedule goes block by block: each has every source's share, what is left of a whole sample carried on to
the next block, in an order of its own. Inside a source samples keep the order that it has alone.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from training.batches.windows import Split, Windows, hash_seed, permute

BLOCK = 256  # samples; an iteration of more has nearly the shares asked for
BLOCK_STREAM = 2**33  # streams of seeds that no epoch and no evaluation reaches


class Mixture(Split):
    """Several splits as one. sources: {name: (weight, split)}; the weights add up to 1."""

    def __init__(self, sources: dict[str, tuple[Fraction, Windows]]):
        self.sources = sources
        self.splits = [split for _, split in sources.values()]
        self.shares = []  # of each source but the last, in what the sources before it leave
        left = Fraction(1)
        for weight, _ in list(sources.values())[:-1]:
            self.shares.append(weight / left)
            left -= weight

    @property
    def parts(self) -> dict[str, tuple[Fraction, Windows]]:
        return self.sources

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` each source has, where blocks end: its weight's part of them, but
        for what rounding each share down moves."""
        counts = []
        for share in self.shares:  # exact: floats would lose samples after 2^53
            counts.append(samples * share.numerator // share.denominator)
            samples -= counts[-1]
        return np.array([*counts, samples])

    def schedule(self, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, numbers inside them) of the samples with these numbers."""
        blocks, inside = np.divmod(numbers, BLOCK)
        sources, own = np.empty_like(numbers), np.empty_like(numbers)
        for block in np.unique(blocks):
            here = blocks == block
            block_sources, block_own = self._block(int(block), seed)
            sources[here], own[here] = block_sources[inside[here]], block_own[inside[here]]
        return sources, own

    def _block(self, block: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        before, after = self.counts(block * BLOCK), self.counts((block + 1) * BLOCK)
        slots = permute(np.arange(BLOCK), BLOCK, hash_seed(seed, BLOCK_STREAM + block))
        sources = np.searchsorted(np.cumsum(after - before), slots, side="right")
        own = np.empty_like(slots)
        for source, (first, end) in enumerate(zip(before, after, strict=True)):
            own[sources == source] = np.arange(first, end)
        return sources, own

    def samples(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        sources, own = self.schedule(numbers, seed)
        rows = [self.splits[source].samples(own[sources == source], seed) for source in np.unique(sources)]
        order = np.argsort(sources, kind="stable")  # where the rows, source after source, belong
        mixed = np.empty_like(rows[0], shape=(len(numbers), rows[0].shape[1]))
        mixed[order] = np.concatenate(rows)
        return mixed
