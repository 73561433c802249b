"""Token files of the packing tests."""

import numpy as np

from training.batches.token_files import TokenFiles

T, EOT, VOCAB = 32, 0, 60_000


def files_of(folder, split="train"):
    paths = sorted(folder.glob(f"{split}_*.bin"))
    return TokenFiles(paths, [p.stat().st_size for p in paths], np.dtype("<u2"), VOCAB)
