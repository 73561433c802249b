"""Packs whole documents into token windows (packing='truncate'). Each document is in one window, from its
beginning. A document longer than a window is cut off; free space in a window is padding that no loss counts.

Which documents share a window depends on every document's length, so it is decided once and stored beside the
tokens. Documents are taken in order, PACKED_TOGETHER at a time, longest first; each goes into the fullest
window that still has space for it (best-fit decreasing; Johnson 1973).
"""

from __future__ import annotations

import logging
import os
import tempfile
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from common.durable_file import create, sync_folder
from common.errors import RunError, UserError
from ops.documents import START
from training.batches.document_starts import DocumentStarts
from training.batches.packed_index import read_index, write_index
from training.batches.random_access import read_bytes
from training.batches.windows import Windows

PACKED_TOGETHER = 1 << 16  # documents; with so many, hardly any space is left over

log = logging.getLogger("nanomfu")


class PackedWindows(Windows):
    """A split as token windows of whole documents."""

    def __init__(
        self, documents: DocumentStarts, block_size: int, folder: Path, index: dict, marked: bool = False
    ):
        """folder, index: what pack_documents() returned for these documents. marked: marks their first
        tokens, for doc_masking."""
        self.tokens, self.block_size, self.folder = documents.tokens, block_size, folder
        self.mark = START if marked else 0
        self.padding = ~(documents.padding_id | self.mark)  # see inputs_and_targets
        self.description = {name: value for name, value in index.items() if name != "sha256"}

    @property
    def count(self) -> int:
        return self.description["windows"]

    def read(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> np.ndarray:
        """The windows (len(indices), T + 1) as int64, negative for padding; the same in all epochs."""
        rows = np.full((len(indices), self.block_size + 1), self.padding, dtype=np.int64)
        pieces = [self._pieces(int(i)) for i in indices]
        for start, length in chain.from_iterable(pieces):
            self.tokens.prefetch([start], length)
        for row, window_pieces in zip(rows, pieces, strict=True):
            at = 0
            for start, length in window_pieces:
                row[at : at + length] = self.tokens.read(start, length)
                row[at] ^= self.mark  # of a negative id, which is a complement, the bit is cleared
                at += length
        return rows

    def _pieces(self, window: int) -> list[list[int]]:
        """(start, length) of each document in this window. Raises RunError if that is impossible: the packing
        was changed after it was checked."""
        documents = self.description["documents"]
        first, end = _read_numbers(self.folder / "windows.bin", self.count + 1, window, 2).tolist()
        if not 0 <= first < end <= documents:
            raise self._changed("windows.bin")
        numbers = _read_numbers(self.folder / "pieces.bin", 2 * documents, 2 * first, 2 * (end - first))
        pieces = numbers.reshape(-1, 2).tolist()
        inside = all(
            0 <= start and 0 < length and start + length <= self.tokens.total for start, length in pieces
        )
        if not inside or sum(length for _, length in pieces) > self.block_size + 1:
            raise self._changed("pieces.bin")
        return pieces

    def _changed(self, name: str) -> RunError:
        return RunError(
            f"{self.folder / name} was changed or damaged after the start; the next start makes it again"
        )


def _read_numbers(path: Path, total: int, first: int, count: int) -> np.ndarray:
    """`count` of the `total` numbers of an int64 file, from number `first` on."""
    return np.frombuffer(read_bytes(path, 8 * total, 8 * first, 8 * count), np.int64)


def pack_documents(
    documents: DocumentStarts, folder: Path, split: str, block_size: int, hashes: bool = True
) -> tuple[Path, dict]:
    """(the folder that says which documents share a window, its index); made here if there is none, or a
    damaged one. hashes: compares the hashes of its files, too. Raises UserError."""
    tokens = documents.tokens
    final = folder / f".packed-{split}-{block_size}"
    stamp = [
        documents.identity,
        PACKED_TOGETHER,
        *([p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in tokens.paths),
    ]
    try:
        if index := read_index(final, stamp, hashes):
            return final, index
        log.warning("Packing the documents of %s into windows of %s tokens, once", folder / split, block_size)
    except UserError as error:
        log.warning("%s is damaged or of an older version (%s): packing the documents again", final, error)
    try:
        with tempfile.TemporaryDirectory(prefix=f"{final.name}.tmp-", dir=folder) as temporary:
            made = Path(temporary) / "made"
            made.mkdir()
            write_index(made, stamp, _write_windows(documents, made, block_size + 1))
            if not _is_made(final, stamp):  # else another machine has made it meanwhile
                if os.path.lexists(final):  # made of other tokens, incomplete or damaged
                    os.rename(final, Path(temporary) / "old")
                os.rename(made, final)
                sync_folder(folder)
        index = read_index(final, stamp, hashes=False)
        assert index is not None, final
        return final, index
    except OSError as error:
        raise UserError(
            f"packing='truncate' keeps which documents share a window in {final}, which cannot be written "
            f"({error}); make the folder writable, or use packing='stream'"
        ) from None


def _is_made(folder: Path, stamp: list) -> bool:
    try:
        return read_index(folder, stamp, hashes=True) is not None
    except UserError:
        return False


def _write_windows(documents: DocumentStarts, folder: Path, capacity: int) -> dict:
    windows = pieces = kept = 0
    with create(folder / "windows.bin") as window_file, create(folder / "pieces.bin") as piece_file:
        window_file.write(np.zeros(1, np.int64).tobytes())
        for starts, lengths in _groups(documents):
            lengths = np.minimum(lengths, capacity)
            window, count = best_fit_decreasing(lengths, capacity)
            order = np.argsort(window, kind="stable")
            np.stack([starts[order], lengths[order]], axis=1).tofile(piece_file)
            ends = pieces + np.cumsum(np.bincount(window, minlength=count))
            ends.astype(np.int64).tofile(window_file)
            windows, pieces, kept = windows + count, pieces + len(starts), kept + int(lengths.sum())
    return {
        "windows": windows,
        "documents": pieces,
        "tokens_kept": kept,
        "tokens_cut_off": documents.tokens.total - kept,
        "share_padded": 1 - kept / (windows * capacity),
    }


def _groups(documents: DocumentStarts) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(starts, lengths) of PACKED_TOGETHER documents at a time. Empty documents, which are an end-of-text
    alone, are left out."""
    ends, begin, total = np.empty(0, np.int64), 0, documents.tokens.total
    for found in documents.ends():
        ends = np.concatenate([ends, found])
        last = len(ends) and ends[-1] == total
        while len(ends) >= PACKED_TOGETHER or (last and len(ends)):
            group, ends = ends[:PACKED_TOGETHER], ends[PACKED_TOGETHER:]
            starts = np.concatenate([[begin], group[:-1]])
            begin = int(group[-1])
            filled = group - starts >= documents.shortest
            if filled.any():
                yield starts[filled], (group - starts)[filled]


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The window of each document, and the number of windows. A window holds `capacity` tokens."""
    window = np.empty(len(lengths), np.int64)
    spaces: list[int] = []  # the sizes of free space that windows have, sorted
    with_space: dict[int, list[int]] = {}  # size of free space -> windows that have it
    count = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        at = bisect_left(spaces, length)
        if at == len(spaces):
            chosen, left, count = count, capacity - length, count + 1
        else:
            space = spaces[at]
            chosen, left = with_space[space].pop(), space - length
            if not with_space[space]:
                del spaces[at], with_space[space]
        window[document] = chosen
        if left > 1:
            if left not in with_space:
                insort(spaces, left)
                with_space[left] = []
            with_space[left].append(chosen)
    return window, count
