"""Writes token files, for datasets of any size; nothing else does. Files that belong together get their names
when all of them are complete and on disk.
"""

import contextlib
import hashlib
import os
import sys
from array import array
from collections.abc import Callable, Iterable
from io import BufferedWriter
from itertools import accumulate
from pathlib import Path

import numpy as np

from common.durable_file import create, sync, sync_folder
from common.errors import UserError
from data.pipeline import token_files
from data.pipeline.token_files import LENGTH_DTYPE, largest_id, lengths_name, plain_ids, stored_dtype

WRITE_TOKENS = 1 << 18  # tokens collected before they are written
MOST_FILES = 1000  # of one split of one part: their names have three digits, and are read in sorted order


class SplitWriter:
    """Writes the tokens of one split into STEM.bin, or if they are more than a file may hold, into
    STEM_000.bin, STEM_001.bin and so on. Every name has .tmp after it. A file is made with its first token.

    The trap: numpy narrows 70000 to uint16 as 4464 without an error, which is another token."""

    def __init__(self, folder: Path, stem: str, vocab_size: int, most: int, dtype: str | None):
        self.folder, self.stem, self.vocab_size, self.most = folder, stem, vocab_size, most
        self.dtype = stored_dtype(dtype or token_files.smallest_dtype(vocab_size))
        self.waiting: list[np.ndarray | list[int]] = []
        self.tokens = 0
        self.ends = array("Q")  # of the documents, counted in tokens of the split
        self.file: BufferedWriter | None = None
        self.sha256 = hashlib.sha256()
        self.files: list[dict] = []  # what meta.json says of each

    def add(self, ids: np.ndarray | list[int]) -> None:
        if len(ids):
            self.waiting.append(ids)
            self.tokens += len(ids)

    def write(self) -> None:
        """Writes what add() has collected."""
        if not self.waiting:
            return
        ids, self.waiting = np.concatenate(self.waiting), []
        assert ids.ndim == 1 and ids.dtype.kind in "iu", (ids.shape, ids.dtype)
        plain = plain_ids(ids) if self.dtype.kind == "i" else ids
        low, high = int(plain.min()), int(plain.max())
        if low < 0 or high >= self.vocab_size:
            raise UserError(
                f"token id {low if low < 0 else high} is outside the vocabulary (0 to {self.vocab_size - 1}) "
                f"and could be stored as another token; vocab_size={self.vocab_size} is not that of the "
                "tokenizer"
            )
        while len(ids):
            opened = self.file or self._open()
            file, here = self.files[-1], ids[: self.most - self.files[-1]["tokens"]]
            stored = here.astype(self.dtype).tobytes()
            opened.write(stored)
            self.sha256.update(stored)
            file |= {"tokens": file["tokens"] + len(here), "max_id": max(file["max_id"], largest_id(here))}
            ids = ids[len(here) :]
            if file["tokens"] == self.most:
                self.close()

    def _open(self) -> BufferedWriter:
        if len(self.files) == MOST_FILES:
            raise UserError(
                f"--shard_tokens={self.most} makes more than {MOST_FILES:,} files of a part; use a larger one"
            )
        self.file, self.sha256 = create(self._temporary(len(self.files))), hashlib.sha256()
        self.files.append({"tokens": 0, "sha256": "", "max_id": 0})
        return self.file

    def _temporary(self, number: int) -> Path:
        return self.folder / f"{self.stem}_{number:03d}.bin.tmp"

    def close(self) -> None:
        if self.file is not None:
            self.files[-1]["sha256"] = self.sha256.hexdigest()
            self.file.close()
            self.file = None

    def finish(self, with_lengths: bool) -> dict[str, dict]:
        """{name: what meta.json says of the file}. with_lengths: also writes the lengths of documents."""
        self.write()
        self.close()
        files = {self._temporary(number).stem: file for number, file in enumerate(self.files)}
        if len(files) == 1:
            os.replace(self._temporary(0), self.folder / f"{self.stem}.bin.tmp")
            files = {f"{self.stem}.bin": self.files[0]}
        if with_lengths:
            bounds = [0, *accumulate(file["tokens"] for file in self.files)]
            ends = np.union1d(np.array(self.ends, np.int64), bounds)  # the end of a file ends a document
            for name, first, after in zip(files, bounds, bounds[1:], strict=False):
                lengths = np.diff(ends[(first <= ends) & (ends <= after)])
                stored = lengths.astype(stored_dtype(LENGTH_DTYPE)).tobytes()
                with create(self.folder / f"{lengths_name(name)}.tmp") as opened:
                    opened.write(stored)
                files[name]["lengths"] = {"documents": len(lengths), "longest": int(lengths.max())}
                files[name]["lengths"]["sha256"] = hashlib.sha256(stored).hexdigest()
        return files


def write_files(
    folder: Path,
    stems: dict[str, str],
    documents: Iterable[tuple[str, Iterable[np.ndarray | list[int]]]],
    vocab_size: int,
    most: int = sys.maxsize,
    with_lengths: bool = False,
    dtype: str | None = None,
    written: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict[str, dict]:
    """Writes (split, pieces of ids) of documents; {name: what meta.json says of the file}. give_names() takes
    away the .tmp after the names. written is told how many documents and tokens were written."""
    writers = {split: SplitWriter(folder, stem, vocab_size, most, dtype) for split, stem in stems.items()}
    count = tokens = 0
    try:
        for split, pieces in documents:
            for ids in pieces:
                writers[split].add(ids)
                tokens += len(ids)
                if tokens >= WRITE_TOKENS:
                    for writer in writers.values():
                        writer.write()
                    written(count, tokens)
                    count = tokens = 0
            writers[split].ends.append(writers[split].tokens)
            count += 1
        files = {name: file for one in writers.values() for name, file in one.finish(with_lengths).items()}
        written(count, tokens)
        return files
    except BaseException:
        for writer in writers.values():
            with contextlib.suppress(OSError):  # closing writes, and a full disk fails again
                writer.close()
            for path in folder.glob(f"{writer.stem}*.tmp"):
                path.unlink()
        raise


def give_names(folder: Path, names: Iterable[str]) -> None:
    """The complete files, which have .tmp after their names, get them."""
    names = list(names)
    for name in names:
        sync(folder / f"{name}.tmp")
    for name in names:
        os.replace(folder / f"{name}.tmp", folder / name)
    sync_folder(folder)
