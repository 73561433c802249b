"""A dataset of random tokens, for a machine that has no other: speed does not depend on what the text says.

    python -m bench.random_tokens 151936
    python train.py config/full_qwen3_1.8b_optimal.py --dataset=random-151936

It is the same everywhere, so a sealed run on it can be run again on any machine. Uniform ids touch every row
of the embedding, as a large real batch does. The loss means nothing. The last id ends a document, for runs
whose documents do not see each other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from common.arguments import whole_number
from common.command import run_command
from common.durable_file import new_folder
from data.pipeline.preparation import write_dataset
from training.configuration.keys import ROOT

TRAIN_TOKENS, VAL_TOKENS = 2_000_000, 100_000  # 8 MB as uint32; longer runs read them again
SEED = 0
VOCABULARY_MIN, VOCABULARY_MAX = 2, 1 << 24
DOCUMENT_TOKENS = 207  # on average, exponentially distributed: the mean of the precision study's Wikipedia


def make_random_dataset(folder: Path, vocab_size: int) -> Path:
    """Writes folder/random-VOCAB unless it is there, and returns its absolute path. Several processes may ask
    for it at the same time."""
    path = Path(folder).resolve() / f"random-{vocab_size}"
    if path.exists():
        return path
    rng, end, splits = np.random.default_rng(SEED), vocab_size - 1, {}
    for split, count in (("train", TRAIN_TOKENS), ("val", VAL_TOKENS)):
        ids = rng.integers(0, end, count)
        lengths = 1 + rng.geometric(1 / (DOCUMENT_TOKENS - 1), count)  # with the end, at least 2
        ends = np.cumsum(lengths) - 1
        ids[ends[ends < count]] = end
        splits[split] = [ids]
    tokenizer, source = {"kind": "none", "name": "random"}, f"uniform random ids, seed {SEED}"
    try:
        with new_folder(path) as temporary:
            write_dataset(temporary, splits, vocab_size, tokenizer, eot_id=end, source=source)
    except OSError:
        if not path.exists():  # else another process was faster
            raise
    return path


def main(argv: list[str]) -> None:
    about = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser("python -m bench.random_tokens", description=about, allow_abbrev=False)
    ids, many = (
        whole_number(VOCABULARY_MIN, VOCABULARY_MAX),
        "how many ids there are; the last ends a document",
    )
    parser.add_argument("vocab_size", type=ids, help=many)
    path = make_random_dataset(ROOT / "data", parser.parse_args(argv).vocab_size)
    print(f"{path}: --dataset={path.name}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
