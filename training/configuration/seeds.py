"""One seed for every stream of random numbers in a run, derived from the key `seed`.

Each purpose has a range of stream numbers, and no two ranges overlap, so no two streams have the same seed.
Ranges that exist never move: checkpoints count samples in an order that these numbers determine. Weights are
apart: model.py draws each one from (seed, its name).
"""

from __future__ import annotations

import numpy as np

EPOCH = range(2**32 - 1)  # the order of windows in an epoch
EVALUATION = range(2**32 - 1, 2**32)  # which windows are evaluated
DROPOUT = range(2**32, 2**33)  # by rank
MIXTURE_BLOCK = range(2**33, 2**63)  # the order of sources in a block of samples
WEIGHT_ROUNDING = range(2**63, 2**63 + 1)  # of weights and moments: one for all ranks
LOW_PRECISION = range(2**63 + 1, 2**63 + 2**32)  # by rank: stochastic rounding of gradients
SAMPLING = range(2**63 + 2**32, 2**64)  # by number of the text that sample.py makes


def stream_seed(seed: int, purpose: range, number: int = 0) -> int:
    """The seed of one stream: that of an epoch, a rank or a block."""
    assert 0 <= number < len(purpose), (purpose, number)
    return int(np.random.SeedSequence((seed, purpose[number])).generate_state(1, np.uint64)[0])
