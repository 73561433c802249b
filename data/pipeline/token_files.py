"""Token files: flat little-endian token ids and nothing else. Every id is checked before it is stored.

The trap: numpy narrows 70000 to uint16 as 4464 without an error, which is another token.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path

import numpy as np

from common.durable_file import create
from common.errors import UserError
from common.json_file import open_regular
from data.pipeline.document_lengths import LengthsWriter, lengths_name, split_lengths

SPLITS = ("train", "val")
DTYPES = ("uint16", "uint32")
UINT16_IDS = 65536  # the largest vocabulary whose ids, 0 to 65535, fit in two bytes
UPPER_HALF = 16  # above the upper 16 bits of any id: vocabularies have less than 2**20 ids
MOST_TOKENS = 1 << 60  # of a file
MOST_SHARDS = 1000  # of one split of one unit: their names have three digits, and are read in sorted order
# The first bytes of other kinds of files. Read as token ids, such a file would pass for text.
OTHER_FILES = {
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"PK\x03\x04": "a zip archive (.npz, .pt)",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"PAR1": "a parquet file",
    (20240520).to_bytes(
        4, "little"
    ): "a token file with a header (llm.c), whose first 1,024 bytes are no tokens",
}


def smallest_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= UINT16_IDS else "uint32"


def stored_dtype(name: str) -> np.dtype:
    """The dtype of this name as the files hold it, whatever the byte order of the machine."""
    return np.dtype(name).newbyteorder("<")


def is_of_split(name: str, split: str) -> bool:
    return name == f"{split}.bin" or name.startswith(f"{split}_") and name.endswith(".bin")


def token_file_names(folder: Path, split: str) -> list[str]:
    """SPLIT.bin if it is there, else the shards SPLIT_*.bin in the order in which they are read."""
    names = os.listdir(folder) if folder.is_dir() else []
    shards = sorted(name for name in names if is_of_split(name, split))
    return [f"{split}.bin"] if f"{split}.bin" in shards else shards


def check_is_tokens(path: Path) -> None:
    """Checks a file whose hash meta.json does not record. Raises UserError."""
    try:
        with open_regular(path) as file:
            begin = file.read(8)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    for magic, kind in OTHER_FILES.items():
        if begin.startswith(magic):
            raise UserError(
                f"{path} is {kind}, not flat token ids; data/text/prepare.py makes them from text"
            )


def looks_wider(numbers: np.ndarray) -> bool:
    """Whether numbers (N,) that were read as one type are ids of a wider type, which raw ids do not say: then
    every second number is 0, or as small as the upper half of an id is."""
    low, high = numbers[::2], numbers[1::2]
    if len(high) < 2:
        return False
    return not high.any() or (len(high) >= 32 and int(high.max()) < UPPER_HALF <= int(low.max()))


def is_count(value: object, most: int = MOST_TOKENS) -> bool:
    """Whether a value from a JSON file is a number of things; a bool is another type."""
    return type(value) is int and 0 <= value <= most


def is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


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
