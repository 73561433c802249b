"""A unit of work: a few input files that one process turns into token files of their own.

The bytes of a unit's token files depend only on its input files and the settings, so they are the same for
any number of workers and machines and after any interruption. The token files get their names when all of
them are complete and on disk. Then the unit's manifest, units/NUMBER.json, is written, which says what they
hold. A unit without a manifest is made again from its beginning.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from common.durable_file import sync, sync_folder, write_json
from common.errors import UserError
from data.pipeline.document_lengths import split_lengths, with_lengths
from data.pipeline.documents import TEXT_KEY, BadRecord, is_one_document, read_records
from data.pipeline.mds_samples import read_tokens
from data.pipeline.token_files import SPLITS, ShardWriter, smallest_dtype
from data.pipeline.verified import remember_files
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer

# Characters encoded at once, which bounds the memory: short documents together, a long one in pieces.
PIECE_CHARS = 1 << 19
UNCUT_CHARS = 1 << 20  # a document that has no place to cut for this long is a bad record
CONTEXT_CHARS = 256  # on either side of a cut, encoded to check that the cut changes no id
BOUNDARIES = [  # places to try a cut, the likeliest to change no id first: between words, lines, clauses
    re.compile(pattern)
    for pattern in (r"(?<=\w)(?=[ \n]\w)", r"(?<=\S)(?=[ \n]\S)|(?<=\n)(?=\S)", r"(?<=\w)(?=[^\w\s])")
]
TRIES = 30  # cuts to try at each kind of boundary
WRITE_TOKENS = 1 << 18  # tokens collected before they are written
BAD_LISTED = 20  # bad records that a unit's manifest describes; all are counted


@dataclass(frozen=True)
class Settings:
    """All that the bytes of a dataset depend on, apart from the input and the tokenizer."""

    eot_id: int | None  # that ends each document; None: document lengths are stored beside the tokens
    bos_id: int | None
    val_fraction: float
    shard_tokens: int
    # of MDS shards that hold token ids (data/pipeline/mds_samples.py)
    tokens: str | None = None
    lengths: str | None = None
    split_at: int | None = None
    bytes_dtype: str | None = None
    # of text
    text_key: str = TEXT_KEY

    def to_dict(self) -> dict[str, Any]:
        """For plan.json. What is only of token ids is left out for text, and so is the usual text_key, which
        older plans do not have."""
        of_text = ("eot_id", "bos_id", "val_fraction", "shard_tokens", "text_key")
        settings = {key: value for key, value in asdict(self).items() if self.tokens or key in of_text}
        if self.text_key == TEXT_KEY:
            del settings["text_key"]
        return settings


@dataclass(frozen=True)
class Unit:
    number: int
    split: str | None  # None: is_validation() chooses train or val for each document
    files: tuple[tuple[str, str], ...]  # (path, name that is the same on every machine)
    max_tokens: int | None

    def manifest_path(self, folder: Path) -> Path:
        return folder / "units" / f"{self.number:06d}.json"

    def remove_leftovers(self, folder: Path) -> None:
        for split in SPLITS:
            for path in folder.glob(f"{split}_{self.number:06d}_*"):
                path.unlink()
        for path in folder.glob(f"units/{self.number:06d}.json.tmp*"):
            path.unlink()


# --- one document ---


def find_cut(text: str, start: int, encode: Callable) -> tuple[int, int, int] | None:
    """The first cut after `start` that changes no id around it: (end of the left side, start of the right
    side, number of ids to drop from the beginning of the right side's).

    Pre-tokenizers end a word before a space, so the right side may begin with one. If the tokenizer itself
    puts a space before every text, as LLaMA 2's does, then the right side must begin after the space, or the
    id of the tokenizer's own space must be dropped.
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
    """The ids of a document, piece by piece: the same ids as if its whole text were encoded at once."""
    text, searched, drop = "", PIECE_CHARS, 0  # searched: characters from start, up to which no cut was found
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
    """Whether a document is for validation. A hash of its place decides, so all machines agree."""
    digest = hashlib.sha256(f"{file}:{number}".encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def split_of_document(unit: Unit, file: str, number: int, val_fraction: float) -> str:
    val = unit.split is None and is_validation(file, number, val_fraction)
    return "val" if val else unit.split or "train"


# --- one unit ---


def read_pieces(path: str, document: Iterable[str], encode: Callable) -> Iterator[np.ndarray]:
    """The ids of a document, all encoded before this returns, so that a BadRecord is raised before anything
    is written. A file of text may have any size, so it alone is encoded while it is written, and what would
    be a BadRecord is a UserError."""
    pieces = encode_document(document, encode)
    return _streamed(pieces, path) if is_one_document(Path(path)) else iter(list(pieces))


def _streamed(pieces: Iterator[np.ndarray], path: str) -> Iterator[np.ndarray]:
    try:
        yield from pieces
    except (BadRecord, EncodeError) as error:
        raise UserError(f"{path}: {error}") from None


def encode_batch(
    batch: list[tuple[str, str, str]], tokenizer: Tokenizer, reject: Callable[[str], None]
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """(split, [ids]) of each (split, place, text) that can be encoded; reject is told of the others."""
    texts = [text for *_, text in batch]
    encoded: list[np.ndarray | None] = []
    try:
        encoded += tokenizer.encode_arrays(texts)
    except EncodeError:  # one by one, to learn which of them it was
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
    unit: Unit,
    tokenizer: Tokenizer,
    settings: Settings,
    reject: Callable[[str], None],
    progress: Callable[[int], None],
) -> Iterator[tuple[str, Iterable[np.ndarray]]]:
    """(split, pieces of ids) of every document, in order; progress is told how many bytes were read."""
    batch: list[tuple[str, str, str]] = []
    chars = 0
    for path, name in unit.files:
        for number, document in read_records(Path(path), progress, settings.text_key):
            if isinstance(document, BadRecord):
                reject(str(document))
                continue
            place = f"{path}, record {number}"
            split = split_of_document(unit, name, number, settings.val_fraction)
            # the text of a short document; a file of text is read in chunks, so its length is not known
            short = (
                document[0] if isinstance(document, list) and len(document[0]) <= 2 * PIECE_CHARS else None
            )
            if batch and (short is None or chars + len(short) > PIECE_CHARS):
                yield from encode_batch(batch, tokenizer, reject)
                batch, chars = [], 0
            if short is not None:
                batch.append((split, place, short))
                chars += len(short)
                continue
            try:
                yield split, read_pieces(path, document, tokenizer.encode)
            except (BadRecord, EncodeError) as error:
                reject(f"{place}: {error}")
    yield from encode_batch(batch, tokenizer, reject)


def token_unit(
    unit: Unit, settings: Settings, reject: Callable[[str], None], progress: Callable[[int], None]
) -> Iterator[tuple[str, list[np.ndarray], np.ndarray]]:
    """(split, [ids], lengths of the documents in them) of every sample of token ids, in order."""
    assert settings.tokens and settings.bytes_dtype, settings
    columns = (settings.tokens, settings.lengths, settings.split_at, settings.bytes_dtype)
    for path, name in unit.files:
        for number, ids, lengths in read_tokens(Path(path), *columns, reject):
            yield split_of_document(unit, name, number, settings.val_fraction), [ids], lengths
        progress(os.path.getsize(path))


class Output:
    """The token files of one unit. It is full when it holds the unit's max_tokens."""

    def __init__(self, unit: Unit, folder: Path, settings: Settings, vocab_size: int):
        self.writers = {
            split: ShardWriter(folder, split, unit.number, settings.shard_tokens, vocab_size)
            for split in SPLITS
        }
        self.start = [] if settings.bos_id is None else [np.array([settings.bos_id], dtype=np.uint32)]
        self.end = np.array([] if settings.eot_id is None else [settings.eot_id], dtype=np.uint32)
        self.max_tokens, self.tokens = unit.max_tokens, 0
        self.waiting: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
        self.lengths: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}  # of what is waiting
        self.waiting_tokens = 0

    @property
    def full(self) -> bool:
        return self.max_tokens is not None and self.tokens >= self.max_tokens

    def add(self, split: str, pieces: Iterable[np.ndarray], lengths: np.ndarray | None = None) -> None:
        """Add a document. If it does not fit it is cut, and the unit's last token is its end-of-text id.
        lengths: of the documents that the ids are, where these are stored."""
        if lengths is not None:
            fitting = sum(lengths.tolist()) if self.max_tokens is None else self.max_tokens - self.tokens
            self.lengths[split].append(split_lengths(lengths, fitting)[0])
        for ids in chain(self.start, pieces, [self.end]):
            if self.max_tokens is not None and self.tokens + len(ids) >= self.max_tokens:
                ids = np.append(ids[: self.max_tokens - self.tokens - len(self.end)], self.end)
            self.waiting[split].append(ids)
            self.tokens += len(ids)
            self.waiting_tokens += len(ids)
            if self.waiting_tokens >= WRITE_TOKENS:
                self.write()
            if self.full:
                return

    def write(self) -> None:
        for split, waiting in self.waiting.items():
            if waiting:
                lengths = self.lengths[split]
                self.writers[split].write(
                    np.concatenate(waiting), np.concatenate(lengths) if lengths else None
                )
                waiting.clear()
                lengths.clear()
        self.waiting_tokens = 0

    def finish(self) -> dict:
        self.write()
        return {name: file for writer in self.writers.values() for name, file in writer.finish().items()}

    def abandon(self) -> None:
        for writer in self.writers.values():
            writer.abandon()


def tokenize(
    unit: Unit,
    folder: Path,
    tokenizer: Tokenizer,
    settings: Settings,
    max_bad: int,
    progress: Callable[[int, int, int], None] = lambda size, documents, tokens: None,
) -> dict:
    """Make the unit's token files; returns its manifest. progress is told of bytes, documents and tokens."""
    unit.remove_leftovers(folder)
    output = Output(unit, folder, settings, tokenizer.vocab_size)
    counts = {"documents": 0, "empty": 0, "bad": 0}
    bad_records: list[str] = []

    def reject(reason: str) -> None:
        counts["bad"] += 1
        bad_records.append(reason)
        if counts["bad"] > max_bad:
            shown = "\n    ".join(bad_records)
            raise UserError(
                f"more than --max_bad={max_bad} bad records; repair them or allow more:\n    {shown}"
            )
        del bad_records[BAD_LISTED:]

    unread = sum(os.path.getsize(path) for path, _ in unit.files)

    def advance(size: int) -> None:
        nonlocal unread
        unread -= size
        progress(size, 0, 0)

    try:
        documents: Iterator = encode_unit(unit, tokenizer, settings, reject, advance)
        if settings.tokens:
            documents = token_unit(unit, settings, reject, advance)
        while not output.full and (document := next(documents, None)) is not None:
            split, pieces, *lengths = document
            pieces = iter(pieces)
            first = next(pieces)
            if len(first) == 0:
                counts["empty"] += 1
                continue
            before = output.tokens
            output.add(split, chain([first], pieces), *lengths)
            counts["documents"] += 1
            progress(0, 1, output.tokens - before)
        progress(unread, 0, 0)  # bytes that were not needed, as max_tokens was reached
        files = output.finish()
        if settings.tokens:  # what was counted is samples
            counts["documents"] = sum(file["lengths"]["documents"] for file in files.values())
        for name in with_lengths(files):
            sync(folder / f"{name}.tmp")
        for name in with_lengths(files):
            os.replace(folder / f"{name}.tmp", folder / name)
        sync_folder(folder)
    except BaseException:
        output.abandon()
        unit.remove_leftovers(folder)
        raise
    manifest = {**counts, "bad_records": bad_records, "files": files}
    write_json(unit.manifest_path(folder), manifest)
    dtype = smallest_dtype(tokenizer.vocab_size)
    remember_files(folder, dtype, files)
    return manifest
