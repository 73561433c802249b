"""A unit of work: a few input files, tokenized by one process into token files that nobody else writes.

A unit's bytes depend on its files and the settings alone, so workers, machines and interruptions cannot
change them. Its token files appear under their names when all are complete and on disk; the record that
follows them, units/NUMBER.json, says so. A unit without a record is done again from its beginning.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from data.documents import BadRecord, read_records
from data.tokens import SPLITS, DataError, TokenWriter, smallest_dtype, sync

PIECE_CHARS = 1 << 20  # of a document encoded at once: a long one is cut, which keeps memory bounded
UNCUT_CHARS = 1 << 23  # a document with no place to cut for this long is a bad record
CONTEXT_CHARS = 256  # on either side of a cut, encoded to see that the cut changes no id
BOUNDARY = re.compile(r"(?<=\w)(?=[ \n]\w)")
BAD_LISTED = 20  # bad records of a unit that its record describes; all are counted


@dataclass(frozen=True)
class Settings:
    """What decides the bytes of a dataset, beside the input and the tokenizer."""

    eot_id: int
    bos_id: int | None
    val_fraction: float
    shard_tokens: int


@dataclass(frozen=True)
class Unit:
    number: int
    split: str | None  # None: each document falls to train or val by a coin
    files: tuple[tuple[str, str], ...]  # (path, name that is the same on every machine)
    max_tokens: int | None

    def record_path(self, folder: Path) -> Path:
        return folder / "units" / f"{self.number:06d}.json"

    def remove_leftovers(self, folder: Path):
        for split in SPLITS:
            for path in folder.glob(f"{split}_{self.number:06d}_*"):
                path.unlink()
        for path in folder.glob(f"units/{self.number:06d}.json.tmp*"):
            path.unlink()


class ShardWriter:
    """One split of one unit, in files of shard_tokens tokens under temporary names."""

    def __init__(self, folder: Path, split: str, unit: int, shard_tokens: int, vocab_size: int):
        self.folder, self.stem, self.shard_tokens = folder, f"{split}_{unit:06d}", shard_tokens
        self.vocab_size, self.writer, self.files = vocab_size, None, {}

    def write(self, ids: np.ndarray):
        while len(ids):
            if self.writer is None:
                self.name = f"{self.stem}_{len(self.files):03d}.bin"
                path = self.folder / f"{self.name}.tmp"
                self.writer = TokenWriter(path, smallest_dtype(self.vocab_size), self.vocab_size)
            room = self.shard_tokens - self.writer.tokens
            self.writer.write(ids[:room])
            ids = ids[room:]
            if self.writer.tokens == self.shard_tokens:
                self.close_file()

    def close_file(self):
        if self.writer is not None:
            self.files[self.name] = self.writer.finish()
            self.writer = None

    def finish(self) -> dict:
        self.close_file()
        return self.files

    def abandon(self):
        if self.writer is not None:
            with contextlib.suppress(OSError):  # a full disk again
                self.writer.file.close()


# --- one document ---


def find_cut(text: str, start: int, encode: Callable) -> tuple[int, int] | None:
    """(end of the left part, start of the right one) of a cut after `start` that changes no id around it.

    Pre-tokenizers end a word before a space, so the right part may begin with it. A tokenizer that puts a
    space before every text, as LLaMA 2's, needs the space left out.
    """
    for tries, match in enumerate(BOUNDARY.finditer(text, start, start + PIECE_CHARS)):
        cut = match.start()
        left, right = text[cut - CONTEXT_CHARS : cut], text[cut : cut + CONTEXT_CHARS]
        whole, head = encode(left + right), encode(left)
        for skip in (0, 1):
            if head + encode(right[skip:]) == whole:
                return cut, cut + skip
        if tries == 100:
            return None
    return None


def encode_document(chunks: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[np.ndarray]:
    """The ids of a document, as of its whole text, piece by piece."""
    text, searched = "", PIECE_CHARS
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > 2 * PIECE_CHARS:
            cut = find_cut(text, start + searched, encode)
            if cut is None:
                searched += PIECE_CHARS
                if searched > UNCUT_CHARS:
                    raise BadRecord(f"{UNCUT_CHARS:,} characters without a space between two words")
                if len(text) - start <= searched + PIECE_CHARS:
                    break
                continue
            yield np.array(encode(text[start : cut[0]]), dtype=np.uint32)
            start, searched = cut[1], PIECE_CHARS
        text = text[start:]
    yield np.array(encode(text), dtype=np.uint32)


def is_validation(file: str, number: int, val_fraction: float) -> bool:
    """A coin that depends only on the document's place, so it falls alike on every machine."""
    digest = hashlib.sha256(f"{file}:{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


# --- one unit ---


def read_pieces(path: str, document: Iterable[str], encode: Callable) -> Iterator[np.ndarray]:
    """encode_document, over before this returns, so that a BadRecord comes before anything is written. Only a
    .txt file, which may be of any size, is encoded while it is written; there the same is a DataError."""
    pieces = encode_document(document, encode)
    return _streamed(pieces, path) if path.endswith(".txt") else iter(list(pieces))


def _streamed(pieces: Iterator[np.ndarray], path: str) -> Iterator[np.ndarray]:
    try:
        yield from pieces
    except BadRecord as error:
        raise DataError(f"{path}: {error}") from None


def read_unit(
    unit: Unit,
    tokenizer,
    settings: Settings,
    max_bad: int,
    tally: dict,
    progress: Callable[[int, int, int], None],
) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """(split, pieces of ids) of every document; tally counts what is no document."""

    def reject(reason: str):
        tally["bad"] += 1
        tally["bad_records"].append(reason)
        if tally["bad"] > max_bad:
            shown = "\n    ".join(tally["bad_records"])
            raise DataError(
                f"more than --max_bad={max_bad} bad records; repair them or allow more:\n    {shown}"
            )
        del tally["bad_records"][BAD_LISTED:]

    for path, name in unit.files:
        for number, document in read_records(Path(path), lambda size: progress(size, 0, 0)):
            if isinstance(document, BadRecord):
                reject(str(document))
                continue
            try:
                pieces = read_pieces(path, document, tokenizer.encode)
            except BadRecord as error:
                reject(f"{path}, record {number}: {error}")
                continue
            first = next(pieces)
            if len(first) == 0:
                tally["empty"] += 1
                continue
            val = unit.split is None and is_validation(name, number, settings.val_fraction)
            yield "val" if val else unit.split or "train", chain([first], pieces)


def tokenize(
    unit: Unit,
    folder: Path,
    tokenizer,
    settings: Settings,
    max_bad: int,
    progress: Callable[[int, int, int], None] = lambda size, documents, tokens: None,
) -> dict:
    """Make the unit's token files and its record. progress is told of bytes, documents and tokens."""
    unit.remove_leftovers(folder)
    vocab_size = tokenizer.vocab_size
    writers = {s: ShardWriter(folder, s, unit.number, settings.shard_tokens, vocab_size) for s in SPLITS}
    start = [] if settings.bos_id is None else [np.array([settings.bos_id])]
    end = [np.array([settings.eot_id])]
    tally = {"documents": 0, "empty": 0, "bad": 0, "bad_records": []}
    tokens = 0
    try:
        for split, pieces in read_unit(unit, tokenizer, settings, max_bad, tally, progress):
            before = tokens
            for ids in chain(start, pieces, end):
                writers[split].write(ids)
                tokens += len(ids)
            tally["documents"] += 1
            progress(0, 1, tokens - before)
            if unit.max_tokens is not None and tokens >= unit.max_tokens:
                break
        files = {name: file for writer in writers.values() for name, file in writer.finish().items()}
        for name in files:
            sync(folder / f"{name}.tmp")
        for name in files:
            os.replace(folder / f"{name}.tmp", folder / name)
        sync_folder(folder)
    except BaseException:
        for writer in writers.values():
            writer.abandon()
        unit.remove_leftovers(folder)
        raise
    record = {**tally, "files": files}
    write_json(unit.record_path(folder), record)
    return record


def write_json(path: Path, content: dict):
    """All or nothing, and on disk when it returns."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
