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
from itertools import chain, islice
from pathlib import Path

import numpy as np

from data.pipeline.documents import BadRecord, read_records
from data.pipeline.token_files import SPLITS, DataError, EncodeError, TokenWriter, smallest_dtype, sync
from data.pipeline.verified import entry, remember

PIECE_CHARS = 1 << 19  # encoded at once: short documents together, a long one in pieces; it bounds the memory
UNCUT_CHARS = 1 << 20  # a document with no place to cut for this long is a bad record
CONTEXT_CHARS = 256  # on either side of a cut, encoded to see that the cut changes no id
BOUNDARIES = [  # where a cut is tried, the likeliest to hold first: between words, lines, clauses
    re.compile(pattern)
    for pattern in (r"(?<=\w)(?=[ \n]\w)", r"(?<=\S)(?=[ \n]\S)|(?<=\n)(?=\S)", r"(?<=\w)(?=[^\w\s])")
]
TRIES = 30  # of each kind
WRITE_TOKENS = 1 << 18  # collected before they are written
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


def find_cut(text: str, start: int, encode: Callable) -> tuple[int, int, int] | None:
    """(end of the left part, start of the right one, how many ids of the right one to drop) of a cut after
    `start` that changes no id around it.

    Pre-tokenizers end a word before a space, so the right part may begin with it. A tokenizer that puts a
    space before every text, as LLaMA 2's, needs the space left out, or the id of its own space dropped.
    """
    for boundary in BOUNDARIES:
        for match in islice(boundary.finditer(text, start, start + PIECE_CHARS), TRIES):
            cut = match.start()
            left, right = text[cut - CONTEXT_CHARS : cut], text[cut : cut + CONTEXT_CHARS]
            whole, head = encode(left + right), encode(left)
            for skip, drop in ((0, 0), (1, 0), (0, 1)):
                if head + encode(right[skip:])[drop:] == whole:
                    return cut, cut + skip, drop
    return None


def encode_document(chunks: Iterable[str], encode: Callable[[str], list[int]]) -> Iterator[np.ndarray]:
    """The ids of a document, as of its whole text, piece by piece."""
    text, searched, drop = "", PIECE_CHARS, 0
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > 2 * PIECE_CHARS:
            cut = find_cut(text, start + searched, encode)
            if cut is None:
                searched += PIECE_CHARS
                if searched > UNCUT_CHARS:
                    raise BadRecord(f"{UNCUT_CHARS:,} characters without a place to cut the text")
                if len(text) - start <= searched + PIECE_CHARS:
                    break
                continue
            yield np.array(encode(text[start : cut[0]])[drop:], dtype=np.uint32)
            _, start, drop = cut
            searched = PIECE_CHARS
        text = text[start:]
    yield np.array(encode(text)[drop:], dtype=np.uint32)


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
    except (BadRecord, EncodeError) as error:
        raise DataError(f"{path}: {error}") from None


def encode_batch(batch: list[tuple[str, str, str]], tokenizer, reject: Callable[[str], None]):
    """(split, [ids]) of each (split, place, text)."""
    texts = [text for *_, text in batch]
    try:
        encoded = tokenizer.encode_arrays(texts)
    except EncodeError:  # which of them it was
        encoded = []
        for _, place, text in batch:
            try:
                encoded += tokenizer.encode_arrays([text])
            except EncodeError as error:
                reject(f"{place}: {error}")
                encoded.append(None)
    for (split, *_), ids in zip(batch, encoded, strict=True):
        if ids is not None:
            yield split, [ids]


def encode_unit(
    unit: Unit, tokenizer, settings: Settings, reject: Callable[[str], None], progress: Callable[[int], None]
) -> Iterator[tuple[str, Iterable[np.ndarray]]]:
    """(split, pieces of ids) of every document, in order; progress is told of bytes."""
    batch, chars = [], 0
    for path, name in unit.files:
        for number, document in read_records(Path(path), progress):
            if isinstance(document, BadRecord):
                reject(str(document))
                continue
            place = f"{path}, record {number}"
            val = unit.split is None and is_validation(name, number, settings.val_fraction)
            split = "val" if val else unit.split or "train"
            length = len(document[0]) if isinstance(document, list) else None
            short = length is not None and length <= 2 * PIECE_CHARS
            if batch and (not short or chars + length > PIECE_CHARS):
                yield from encode_batch(batch, tokenizer, reject)
                batch, chars = [], 0
            if short:
                batch.append((split, place, document[0]))
                chars += length
                continue
            try:
                yield split, read_pieces(path, document, tokenizer.encode)
            except (BadRecord, EncodeError) as error:
                reject(f"{place}: {error}")
    yield from encode_batch(batch, tokenizer, reject)


class Output:
    """The token files of one unit, which its share of max_tokens may fill."""

    def __init__(self, unit: Unit, folder: Path, settings: Settings, vocab_size: int):
        self.writers = {
            split: ShardWriter(folder, split, unit.number, settings.shard_tokens, vocab_size)
            for split in SPLITS
        }
        self.start = [] if settings.bos_id is None else [np.array([settings.bos_id], dtype=np.uint32)]
        self.end = np.array([settings.eot_id], dtype=np.uint32)
        self.share, self.tokens = unit.max_tokens, 0
        self.waiting, self.waiting_tokens = {split: [] for split in SPLITS}, 0

    @property
    def full(self) -> bool:
        return self.share is not None and self.tokens >= self.share

    def add(self, split: str, pieces: Iterable[np.ndarray]):
        """A document. One that does not fit is cut, and its end-of-text id is the last of the share."""
        for ids in chain(self.start, pieces, [self.end]):
            if self.share is not None and self.tokens + len(ids) >= self.share:
                ids = np.append(ids[: self.share - self.tokens - 1], self.end)
            self.waiting[split].append(ids)
            self.tokens += len(ids)
            self.waiting_tokens += len(ids)
            if self.waiting_tokens >= WRITE_TOKENS:
                self.write()
            if self.full:
                return

    def write(self):
        for split, waiting in self.waiting.items():
            if waiting:
                self.writers[split].write(np.concatenate(waiting))
                waiting.clear()
        self.waiting_tokens = 0

    def finish(self) -> dict:
        self.write()
        return {name: file for writer in self.writers.values() for name, file in writer.finish().items()}

    def abandon(self):
        for writer in self.writers.values():
            writer.abandon()


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
    output = Output(unit, folder, settings, tokenizer.vocab_size)
    tally = {"documents": 0, "empty": 0, "bad": 0, "bad_records": []}

    def reject(reason: str):
        tally["bad"] += 1
        tally["bad_records"].append(reason)
        if tally["bad"] > max_bad:
            shown = "\n    ".join(tally["bad_records"])
            raise DataError(
                f"more than --max_bad={max_bad} bad records; repair them or allow more:\n    {shown}"
            )
        del tally["bad_records"][BAD_LISTED:]

    total = sum(os.path.getsize(path) for path, _ in unit.files)

    def advance(size: int):
        nonlocal total
        total -= size
        progress(size, 0, 0)

    try:
        documents = encode_unit(unit, tokenizer, settings, reject, advance)
        while not output.full and (document := next(documents, None)) is not None:
            split, pieces = document
            pieces = iter(pieces)
            first = next(pieces)
            if len(first) == 0:
                tally["empty"] += 1
                continue
            before = output.tokens
            output.add(split, chain([first], pieces))
            tally["documents"] += 1
            progress(0, 1, output.tokens - before)
        progress(total, 0, 0)  # what a share left unread
        files = output.finish()
        for name in files:
            sync(folder / f"{name}.tmp")
        for name in files:
            os.replace(folder / f"{name}.tmp", folder / name)
        sync_folder(folder)
    except BaseException:
        output.abandon()
        unit.remove_leftovers(folder)
        raise
    record = {**tally, "files": files}
    write_json(unit.record_path(folder), record)
    dtype = smallest_dtype(tokenizer.vocab_size)
    remember(folder, {name: entry(folder / name, dtype, file) for name, file in files.items()})
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
