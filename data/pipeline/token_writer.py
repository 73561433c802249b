"""Writes token files, and the files of document lengths beside them. Every id is checked before it is stored.

The trap: numpy narrows 70000 to uint16 as 4464 without an error, which is another token.
"""

import contextlib
import hashlib
from pathlib import Path

import numpy as np

from common.durable_file import create
from common.errors import UserError
from data.pipeline.document_lengths import MOST_LENGTH, lengths_name
from data.pipeline.token_files import smallest_dtype, stored_dtype

MOST_SHARDS = 1000  # of one split of one unit: their names have three digits, and are read in sorted order


class TokenWriter:
    """Checks ids and appends them to one file; counts and hashes what it wrote."""

    def __init__(self, path: Path, dtype: str, vocab_size: int):
        self.file = create(path)
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
        self.lengths_writer: LengthsWriter | None = None
        self.files: dict[str, dict] = {}

    def write(self, ids: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """lengths: of the documents that these ids are, if files of lengths are written beside the tokens."""
        while len(ids):
            writer = self.writer or self.open_file(lengths is not None)
            part = ids[: self.shard_tokens - writer.tokens]
            writer.write(part)
            if lengths is not None and self.lengths_writer is not None:
                here, lengths = split_lengths(lengths, len(part))
                self.lengths_writer.write(here)
            ids = ids[len(part) :]
            if writer.tokens == self.shard_tokens:
                self.close_file()

    def open_file(self, with_lengths: bool) -> TokenWriter:
        if len(self.files) == MOST_SHARDS:
            raise UserError(
                f"--shard_tokens={self.shard_tokens} makes more than {MOST_SHARDS:,} files of one "
                "unit; use a larger one"
            )
        self.name = f"{self.stem}_{len(self.files):03d}.bin"
        path = self.folder / f"{self.name}.tmp"
        self.writer = TokenWriter(path, smallest_dtype(self.vocab_size), self.vocab_size)
        if with_lengths:
            self.lengths_writer = LengthsWriter(self.folder / f"{lengths_name(self.name)}.tmp")
        return self.writer

    def close_file(self) -> None:
        if self.writer is not None:
            self.files[self.name] = self.writer.finish()
            self.writer = None
        if self.lengths_writer is not None:
            self.files[self.name]["lengths"] = self.lengths_writer.finish()
            self.lengths_writer = None

    def finish(self) -> dict[str, dict]:
        """{name: what meta.json says of the file}"""
        self.close_file()
        return self.files

    def abandon(self) -> None:
        for writer in (self.writer, self.lengths_writer):
            if writer is not None:
                with contextlib.suppress(OSError):  # closing writes, and a full disk fails again
                    writer.file.close()


class LengthsWriter:
    """Appends lengths to one file; counts and hashes what it wrote."""

    def __init__(self, path: Path):
        self.file = create(path)
        self.documents = self.longest = 0
        self.sha256 = hashlib.sha256()

    def write(self, lengths: np.ndarray) -> None:
        if len(lengths) == 0:
            return
        low, high = int(lengths.min()), int(lengths.max())
        if low < 1 or high > MOST_LENGTH:
            raise UserError(f"a document of {low if low < 1 else high:,} tokens cannot be stored")
        stored = lengths.astype("<u4").tobytes()
        self.file.write(stored)
        self.sha256.update(stored)
        self.documents += len(lengths)
        self.longest = max(self.longest, high)

    def finish(self) -> dict:
        """What meta.json says of the file."""
        self.file.close()
        return {"documents": self.documents, "longest": self.longest, "sha256": self.sha256.hexdigest()}


def split_lengths(lengths: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of the first `tokens` tokens, and of the rest. A document across the border is cut."""
    ends = np.cumsum(lengths, dtype=np.int64)
    whole = int(np.searchsorted(ends, tokens, side="right"))
    inside = tokens - (int(ends[whole - 1]) if whole else 0)
    if not inside or whole == len(lengths):
        return lengths[:whole], lengths[whole:]
    rest = lengths[whole:].copy()
    rest[0] -= inside
    return np.append(lengths[:whole], inside), rest
