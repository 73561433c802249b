"""Finds where documents begin, and marks their first tokens: after an end-of-text id, or by the lengths that
are stored beside the tokens (data/pipeline/document_lengths.py). Everything else of a run takes both alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.json_file import open_regular
from data.folders import how_to_make
from data.pipeline.token_files import lengths_name
from ops.documents import START
from training.batches.token_files import TokenFiles
from training.configuration.keys import TrainConfig

CHUNK_TOKENS = 1 << 24  # tokens read at a time, to find documents


class EndOfText:
    """Documents end with an id, which belongs to them."""

    shortest = 2  # an end-of-text id alone is an empty document

    def __init__(self, tokens: TokenFiles, eot_id: int):
        self.tokens, self.padding_id, self.identity = tokens, eot_id, eot_id

    def mark(self, ids: np.ndarray, start: int) -> None:
        """Sets START at the first token of each document in these ids (T,), int64, from position `start`."""
        ids[1:] |= np.where(ids[:-1] == self.padding_id, START, 0)

    def ends(self) -> Iterator[np.ndarray]:
        """The positions after the documents, in order, some at a time."""
        tokens = self.tokens
        for first in range(0, tokens.total, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, tokens.total - first)
            tokens.prefetch([first], count)  # files are opened for random access, without reading ahead
            chunk = tokens.read(first, count)
            ends = np.flatnonzero(chunk == self.padding_id) + first + 1
            if first + count == tokens.total and (not len(ends) or ends[-1] != tokens.total):
                ends = np.append(ends, tokens.total)  # the last document has no end-of-text
            yield ends


class ListedDocuments:
    """Files of lengths say where documents end. Memory holds 8 bytes for each document."""

    shortest = 1

    def __init__(self, tokens: TokenFiles, files: dict[str, dict], eot_id: int | None = None):
        """files: {name of a token file: what meta.json says of it}. Reads all lengths. Raises UserError."""
        self.tokens = tokens
        self.padding_id = eot_id or 0  # any id of the vocabulary
        self.identity = [files[path.name]["lengths"]["sha256"] for path in tokens.paths]
        starts = []
        for path, first, after in zip(tokens.paths, tokens.starts, tokens.starts[1:], strict=False):
            lengths = _read_lengths(path.with_name(lengths_name(path.name)), after - first)
            starts.append(first + np.cumsum(lengths) - lengths)
        self.starts = np.concatenate(starts)

    def mark(self, ids: np.ndarray, start: int) -> None:
        """Sets START at the first token of each document in these ids (T,), int64, from position `start` on;
        after the last token comes the first."""
        start %= self.tokens.total
        for begin in (start, start - self.tokens.total):
            inside = slice(*np.searchsorted(self.starts, (begin, begin + len(ids))))
            ids[self.starts[inside] - begin] ^= START  # also of a complement

    def ends(self) -> Iterator[np.ndarray]:
        """The positions after the documents, in order."""
        yield np.append(self.starts[1:], self.tokens.total)


def _read_lengths(path: Path, tokens: int) -> np.ndarray:
    """The lengths of all documents of a file of so many tokens, int64. Raises UserError."""
    try:
        with open_regular(path) as file:
            lengths = np.frombuffer(file.read(), "<u4").astype(np.int64)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; {how_to_make(path.parent)}") from None
    if not lengths.all() or lengths.sum() != tokens:
        wrong = f"documents of {lengths.sum():,} tokens in all, and its tokens are {tokens:,}"
        wrong = wrong if lengths.all() else "a document of 0 tokens"
        raise UserError(f"{path} has {wrong}; {how_to_make(path.parent)}")
    return lengths


DocumentStarts = EndOfText | ListedDocuments


def find_documents(config: TrainConfig, meta: dict, tokens: TokenFiles) -> DocumentStarts:
    """Where the documents of a split begin. Raises UserError."""
    if all("lengths" in meta["files"].get(path.name, {}) for path in tokens.paths):
        return ListedDocuments(tokens, meta["files"], meta["eot_id"])
    if meta["eot_id"] is not None:
        return EndOfText(tokens, int(meta["eot_id"]))
    asked = "doc_masking=True" if config.doc_masking else f"packing={config.packing!r}"
    raise UserError(
        f"{asked} needs to know where documents end, but the meta.json of dataset={config.dataset!r} "
        "names no eot_id and no document lengths; prepare it with end-of-text tokens, or leave the key out"
    )
