"""Token files: flat little-endian token ids and nothing else (data/pipeline/token_writer.py writes them).

Where no end-of-text ids are between documents, X.bin.lengths is beside X.bin: the tokens of each document, in
order, which add up to those of the file, as little-endian uint32 and nothing else. The trap is a reader that
does not know of lengths and takes all of the text for one document: a meta.json that names lengths has a
format of its own, which such a reader refuses.

Of conversations the dtype is int32: a token that is no target of training is stored as the bitwise complement
of its id (data/pipeline/conversations.py).
"""

import os
import re
from pathlib import Path

import numpy as np

SPLITS = ("train", "val")
MASKED = "int32"  # negative: the complement of an id that is no target
DTYPES = ("uint16", "uint32", MASKED)
UINT16_IDS = 65536  # the largest vocabulary whose ids, 0 to 65535, fit in two bytes
UPPER_HALF = 16  # above the upper 16 bits of any id: vocabularies have less than 2**20 ids
MOST_TOKENS = 1 << 60  # of a file
LENGTHS = ".lengths"
LENGTH_DTYPE = "uint32"
MOST_LENGTH = 2**32 - 1  # tokens of a document


def smallest_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= UINT16_IDS else "uint32"


def plain_ids(stored: np.ndarray) -> np.ndarray:
    """The ids, int64, of targets and other tokens alike."""
    stored = stored.astype(np.int64)
    return np.where(stored < 0, ~stored, stored)


def largest_id(stored: np.ndarray) -> int:
    return max(int(stored.max(initial=0)), ~int(stored.min(initial=0)))


def stored_dtype(name: str) -> np.dtype:
    """The dtype of this name as the files hold it, whatever the byte order of the machine."""
    return np.dtype(name).newbyteorder("<")


def lengths_name(name: str) -> str:
    """The file of lengths that belongs to this token file."""
    return name + LENGTHS


def described(dtype: str, files: dict[str, dict]) -> dict[str, dict]:
    """{name: dtype, tokens, sha256, max_id} of token files, as meta.json describes them, and of the files of
    lengths beside them."""
    found = {name: {"dtype": dtype} | file for name, file in files.items()}
    for name, lengths in ((name, file["lengths"]) for name, file in files.items() if "lengths" in file):
        numbers = {"tokens": lengths["documents"], "max_id": lengths["longest"]}
        found[lengths_name(name)] = {"dtype": LENGTH_DTYPE, "sha256": lengths["sha256"]} | numbers
    return found


def is_of_split(name: str, split: str) -> bool:
    return name == f"{split}.bin" or name.startswith(f"{split}_") and name.endswith(".bin")


def token_file_names(folder: Path, split: str) -> list[str]:
    """SPLIT.bin if it is there, else the shards SPLIT_*.bin in the order in which they are read."""
    names = os.listdir(folder) if folder.is_dir() else []
    shards = sorted(name for name in names if is_of_split(name, split))
    return [f"{split}.bin"] if f"{split}.bin" in shards else shards


def looks_wider(numbers: np.ndarray) -> bool:
    """Whether numbers (N,) that were read as one type are ids of a wider type, which raw ids do not say: then
    every second number is 0, or as small as the upper half of an id is."""
    low, high = numbers[::2], numbers[1::2]
    of_ids = len(high) >= 32 and int(high.max()) < UPPER_HALF <= int(low.max())
    return of_ids or (len(high) > 1 and bool(low.any()) and not high.any())


def is_count(value: object, most: int = MOST_TOKENS) -> bool:
    """Whether a value from a JSON file is a number of things; a bool is another type."""
    return type(value) is int and 0 <= value <= most


def is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
