"""Where documents begin in token files without end-of-text ids: beside X.bin is X.bin.lengths, the number of
tokens of each document, in order, as little-endian uint32 and nothing else.

The lengths of a file add up to its tokens, so the end of a file ends a document. The trap is a reader that
does not know of lengths and takes all of the text for one document: a meta.json that names lengths has a
format of its own, which such a reader refuses.
"""

import hashlib
from pathlib import Path

import numpy as np

from common.durable_file import create
from common.errors import UserError

SUFFIX = ".lengths"
LENGTH_DTYPE = "uint32"
LENGTH_BYTES = 4
MOST_LENGTH = 2**32 - 1  # tokens of a document


def lengths_name(name: str) -> str:
    """The file of lengths that belongs to this token file."""
    return name + SUFFIX


def lengths_files(files: dict[str, dict]) -> dict[str, dict]:
    """{name of a file of lengths: what verified.py compares}. files: {name of a token file: what meta.json
    says of it}"""
    return {
        lengths_name(name): {"sha256": file["lengths"]["sha256"], "max_id": file["lengths"]["longest"]}
        for name, file in files.items()
        if "lengths" in file
    }


def with_lengths(files: dict[str, dict]) -> list[str]:
    """The names of the token files, and of their files of lengths."""
    return [*files, *lengths_files(files)]


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
