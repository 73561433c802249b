"""Finds where documents begin, and marks their first tokens: after an end-of-text id, or by the lengths that
are stored beside the tokens (data/pipeline/document_lengths.py). Everything else of a run takes both alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.errors import RunError, UserError
from common.json_file import open_regular
from data.folders import how_to_make
from data.pipeline.document_lengths import LENGTH_BYTES, lengths_name
from ops.documents import START
from training.batches.random_access import read_bytes
from training.batches.token_files import TokenFiles
from training.configuration.keys import TrainConfig

CHUNK_TOKENS = 1 << 24  # tokens read at a time, to find documents
BLOCK = 1024  # lengths; of each block, the first token is held in memory


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
    """Files of lengths say where documents end. Memory holds one number for each BLOCK documents."""

    shortest = 1

    def __init__(self, tokens: TokenFiles, files: dict[str, dict], eot_id: int | None = None):
        """files: {name of a token file: what meta.json says of it}. Reads all lengths. Raises UserError."""
        self.tokens = tokens
        self.padding_id = eot_id or 0  # any id of the vocabulary
        self.paths = [path.with_name(lengths_name(path.name)) for path in tokens.paths]
        self.counts = [files[path.name]["lengths"]["documents"] for path in tokens.paths]
        self.identity = [files[path.name]["lengths"]["sha256"] for path in tokens.paths]
        places = [self._index(number) for number in range(len(self.paths))]
        # of each block: its first token, its file, and the number of its first document in this file
        self.starts, self.files, self.firsts = (
            np.concatenate(column) for column in zip(*places, strict=True)
        )

    def _index(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        path, starts, at = self.paths[number], [], self.tokens.starts[number]
        firsts = np.arange(0, self.counts[number], BLOCK)
        try:
            with open_regular(path) as file:
                for _ in firsts:
                    lengths = np.frombuffer(file.read(BLOCK * LENGTH_BYTES), "<u4")
                    if not len(lengths) or not lengths.all():
                        raise self._wrong(path, "a document of 0 tokens, or is cut off")
                    starts.append(at)
                    at += int(lengths.sum(dtype=np.int64))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}; {how_to_make(path.parent)}") from None
        if at != self.tokens.starts[number + 1]:
            tokens = self.tokens.starts[number + 1] - self.tokens.starts[number]
            found = at - self.tokens.starts[number]
            raise self._wrong(path, f"documents of {found:,} tokens in all, and its tokens are {tokens:,}")
        return np.array(starts, np.int64), np.full(len(firsts), number), firsts

    def _wrong(self, path: Path, what: str) -> UserError:
        return UserError(f"{path} has {what}; {how_to_make(path.parent)}")

    def mark(self, ids: np.ndarray, start: int) -> None:
        """Sets START at the first token of each document in these ids (T,), int64, from position `start` on;
        after the last token comes the first."""
        done = 0
        while done < len(ids):
            begin = (start + done) % self.tokens.total
            count = min(len(ids) - done, self.tokens.total - begin)
            for starts in self._starts(begin, begin + count):
                ids[starts - begin + done] |= START
            done += count

    def _starts(self, begin: int, end: int) -> Iterator[np.ndarray]:
        """Positions from `begin` to below `end` where a document begins."""
        block = int(np.searchsorted(self.starts, begin, side="right")) - 1
        while block < len(self.starts) and self.starts[block] < end:
            starts = self._block(block)[:-1]
            yield starts[(starts >= begin) & (starts < end)]
            block += 1

    def _block(self, block: int) -> np.ndarray:
        """The first token of each document of a block, and the position after the last of them."""
        file, first = int(self.files[block]), int(self.firsts[block])
        path, documents = self.paths[file], self.counts[file]
        count = min(BLOCK, documents - first)
        place = (first * LENGTH_BYTES, count * LENGTH_BYTES)
        lengths = np.frombuffer(read_bytes(path, documents * LENGTH_BYTES, *place), "<u4")
        edges = self.starts[block] + np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        after = self.starts[block + 1] if block + 1 < len(self.starts) else self.tokens.total
        if edges[-1] != after:
            raise RunError(f"{path} was changed or damaged after the start")
        return edges

    def ends(self) -> Iterator[np.ndarray]:
        """The positions after the documents, in order, some at a time."""
        for block in range(len(self.starts)):
            yield self._block(block)[1:]


DocumentStarts = EndOfText | ListedDocuments


def find_documents(config: TrainConfig, meta: dict, tokens: TokenFiles) -> DocumentStarts | None:
    """Where the documents of a split begin; None if the run does not need it. Raises UserError."""
    if not config.doc_masking and config.packing == "stream":
        return None
    if all("lengths" in meta["files"].get(path.name, {}) for path in tokens.paths):
        return ListedDocuments(tokens, meta["files"], meta["eot_id"])
    if meta["eot_id"] is not None:
        return EndOfText(tokens, int(meta["eot_id"]))
    asked = "doc_masking=True" if config.doc_masking else f"packing={config.packing!r}"
    raise UserError(
        f"{asked} needs to know where documents end, but the meta.json of dataset={config.dataset!r} "
        "names no eot_id and no document lengths; prepare it with end-of-text tokens, or leave the key out"
    )
