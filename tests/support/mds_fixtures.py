"""What the samples of tests/support/mds/ hold; its README says how mosaicml-streaming wrote them."""

import numpy as np

T = 32


def tokens(id_dtype: str, length_dtype: str, samples: int = 12):
    """(ids, lengths of 4 documents in them) of each sample."""
    rng = np.random.default_rng(0)
    for _ in range(samples):
        ids = rng.integers(0, 250, T)
        cuts = np.sort(rng.choice(np.arange(1, T), 3, replace=False))
        yield ids.astype(id_dtype), np.diff([0, *cuts, T]).astype(length_dtype)


def texts() -> list[str]:
    return [f"Text number {n}: " + "naïve 日本語 words. " * (n % 4) for n in range(40)]
