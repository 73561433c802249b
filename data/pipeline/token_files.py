"""Token files: flat little-endian token ids and nothing else. Every id is checked before it is stored.

The trap: numpy narrows 70000 to uint16 as 4464 without an error, which is another token.
"""

import contextlib
import hashlib
from pathlib import Path

import numpy as np

from common.errors import UserError

SPLITS = ("train", "val")
UINT16_IDS = 65536  # the largest vocabulary whose ids, 0 to 65535, fit in two bytes


def smallest_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= UINT16_IDS else "uint32"


def stored_dtype(name: str) -> np.dtype:
    """The dtype of this name as the files hold it, whatever the byte order of the machine."""
    return np.dtype(name).newbyteorder("<")


class TokenWriter:
    """Checks ids and appends them to one file; counts and hashes what it wrote."""

    def __init__(self, path: Path, dtype: str, vocab_size: int):
        self.file = open(path, "wb")
        self.dtype = stored_dtype(dtype)
        self.vocab_size = vocab_size
        self.tokens = 0
        self.max_id = 0
        self.sha256 = hashlib.sha256()

    def write(self, ids: np.ndarray | list[int]) -> None:
        if len(ids) == 0:
            return
        ids = np.asarray(ids)
        assert ids.ndim == 1 and ids.dtype.kind in "iu", (ids.shape, ids.dtype)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise UserError(
                f"token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1}) and could be stored "
                f"as another token; vocab_size={self.vocab_size} is not that of the tokenizer"
            )
        stored = ids.astype(self.dtype).tobytes()
        self.file.write(stored)
        self.sha256.update(stored)
        self.tokens += len(ids)
        self.max_id = max(self.max_id, high)

    def finish(self) -> dict:
        """What meta.json says of the file."""
        self.file.close()
        return {"tokens": self.tokens, "sha256": self.sha256.hexdigest(), "max_id": self.max_id}


class ShardWriter:
    """Writes one split of one unit, in files of at most shard_tokens tokens. Each has .tmp after its name."""

    def __init__(self, folder: Path, split: str, unit: int, shard_tokens: int, vocab_size: int):
        self.folder, self.stem, self.shard_tokens = folder, f"{split}_{unit:06d}", shard_tokens
        self.vocab_size = vocab_size
        self.name = ""  # of the file that is open
        self.writer: TokenWriter | None = None
        self.files: dict[str, dict] = {}

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self.writer is None:
                self.name = f"{self.stem}_{len(self.files):03d}.bin"
                path = self.folder / f"{self.name}.tmp"
                self.writer = TokenWriter(path, smallest_dtype(self.vocab_size), self.vocab_size)
            missing = self.shard_tokens - self.writer.tokens
            self.writer.write(ids[:missing])
            ids = ids[missing:]
            if self.writer.tokens == self.shard_tokens:
                self.close_file()

    def close_file(self) -> None:
        if self.writer is not None:
            self.files[self.name] = self.writer.finish()
            self.writer = None

    def finish(self) -> dict[str, dict]:
        """{name: what meta.json says of the file}"""
        self.close_file()
        return self.files

    def abandon(self) -> None:
        if self.writer is not None:
            with contextlib.suppress(OSError):  # closing writes, and a full disk fails again
                self.writer.file.close()
