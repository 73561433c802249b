"""A dataset of random tokens, for a machine that has no other: speed does not depend on what the text says.

Uniform ids touch every row of the embedding, as a large real batch does. The loss means nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.pipeline.small_dataset import write_dataset

TRAIN_TOKENS, VAL_TOKENS = 2_000_000, 100_000  # 8 MB as uint32; longer runs read them again
SEED = 0


def make_random_dataset(folder: Path, vocab_size: int) -> Path:
    """Writes folder/random-VOCAB unless it is there, and returns its absolute path."""
    path = Path(folder).resolve() / f"random-{vocab_size}"
    if (path / "meta.json").exists():  # written last
        return path
    rng = np.random.default_rng(SEED)
    splits = {
        split: [rng.integers(0, vocab_size, count)]
        for split, count in (("train", TRAIN_TOKENS), ("val", VAL_TOKENS))
    }
    source = f"uniform random ids, seed {SEED}"
    write_dataset(path, splits, vocab_size, {"kind": "none", "name": "random"}, eot_id=None, source=source)
    return path
