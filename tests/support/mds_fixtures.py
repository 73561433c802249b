"""Writes tests/support/mds/ again, in an environment that has mosaicml-streaming 0.13.0.

python tests/support/mds_fixtures.py tests/support/mds
"""

import shutil
import sys
from pathlib import Path

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


def write(folder: Path, columns: dict[str, str], samples, **options) -> None:
    from streaming import MDSWriter

    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(out=str(folder), columns=columns, progress_bar=False, **options) as writer:
        for sample in samples:
            writer.write(sample)


def main(out: Path) -> None:
    ids = {"input_ids": "ndarray:uint32", "attention_mask": "ndarray:uint32", "audio": "str"}
    samples = [{"input_ids": i, "attention_mask": n, "audio": ""} for i, n in tokens("uint32", "uint32")]
    options = {"compression": "zstd", "hashes": ["sha256", "xxh64"], "size_limit": 1200}
    write(out / "ndarray_zstd", ids, samples, **options)

    ids = {"input_ids": "ndarray", "attention_mask": "ndarray"}
    samples = [{"input_ids": i, "attention_mask": n} for i, n in tokens("int64", "int32")]
    write(out / "ndarray_dynamic", ids, samples, size_limit=1500, hashes=["sha1"])

    ids = {"input_ids": "ndarray:int32:32", "attention_mask": "ndarray:uint16:4", "id": "int"}
    numbered = enumerate(tokens("int32", "uint16"))
    samples = [{"input_ids": i, "attention_mask": n, "id": number} for number, (i, n) in numbered]
    write(out / "ndarray_shape", ids, samples, compression="gz:9", size_limit=1 << 20)

    samples = [{"tokens": i.tobytes()} for i, _ in tokens("int64", "int64")]
    options = {"compression": "bz2:9", "hashes": ["md5"], "size_limit": None}
    write(out / "bytes", {"tokens": "bytes"}, samples, **options)

    samples = [{"text": text, "source": {"n": n}} for n, text in enumerate(texts())]
    options = {"compression": "zstd:3", "hashes": ["blake2b"], "size_limit": 1000}
    write(out / "text", {"text": "str", "source": "json"}, samples, **options)

    samples = [{"text": text, "extra": n} for n, text in enumerate(texts()[:2])]
    write(out / "pickled", {"text": "str", "extra": "pkl"}, samples)
    write(out / "brotli", {"text": "str"}, [{"text": text} for text in texts()[:2]], compression="br")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
