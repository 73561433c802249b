"""A unit of work: a few input files, or a part of a large one, that one process turns into token files.

The bytes of a unit's token files depend only on its input and the settings, so they are the same for any
number of workers and machines and after any interruption. The token files get their names when all of
them are complete and on disk. Then the unit's manifest, units/NUMBER.json, is written, which says what they
hold. A unit without a manifest is made again from its beginning.
"""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.durable_file import sync, sync_folder, write_bytes, write_json
from common.errors import UserError
from data.pipeline.bad_records import BAD_LISTED
from data.pipeline.document_lengths import with_lengths
from data.pipeline.document_pieces import PIECE_CHARS, read_pieces
from data.pipeline.documents import (
    TEXT_KEY,
    BadRecord,
    hash_content,
    hash_document,
    is_one_document,
    read_records,
)
from data.pipeline.mds_samples import read_tokens
from data.pipeline.token_files import SPLITS, smallest_dtype
from data.pipeline.token_writer import ShardWriter, split_lengths
from data.pipeline.verified import remember_files
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer

WRITE_TOKENS = 1 << 18  # tokens collected before they are written
# Bytes of text in a byte on disk, about: a zstd archive has three of prose, eight of code
EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}


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
    splits: str = "names"  # of files of many documents; "ignore": their names say nothing
    val_below: int | None = None  # hashes of documents for validation; None: val_fraction of all hashes

    def to_dict(self) -> dict[str, Any]:
        """For plan.json. What is only of token ids is left out for text, and so are the usual values of two
        settings. val_below follows from the others. split_by says that the text of a document decides its
        split; plans of the first versions lack it, where the file and the number of the document did."""
        left_out = {"val_below"} | (
            set() if self.tokens else {"tokens", "lengths", "split_at", "bytes_dtype"}
        )
        unsaid = {"text_key": TEXT_KEY, "splits": "names"}
        settings = {key: value for key, value in asdict(self).items() if key not in left_out}
        said = {key: value for key, value in settings.items() if value != unsaid.get(key, ...)}
        return {**said, "split_by": "text"}


@dataclass(frozen=True)
class Unit:
    number: int
    split: str | None  # None: is_validation() chooses train or val for each document
    files: tuple[tuple[str, str], ...]  # (path, name that is the same on every machine)
    max_tokens: int | None
    # (first byte, byte after the last) of the only file, if it is divided
    span: tuple[int, int] | None = None

    def size(self, size_of: Callable[[str], int] = os.path.getsize) -> int:
        """Bytes of input."""
        return self.span[1] - self.span[0] if self.span else sum(size_of(path) for path, _ in self.files)

    def text_size(self, size_of: Callable[[str], int] = os.path.getsize) -> int:
        """About how many bytes of text; of a compressed file, without reading it."""
        return self.size(size_of) * EXPANSION.get(Path(self.files[0][0]).suffix, 1)

    def manifest_path(self, folder: Path) -> Path:
        return folder / "units" / f"{self.number:06d}.json"

    def hashes_path(self, folder: Path) -> Path:
        """The hashes of the documents (data/pipeline/splits.py), little-endian uint64, if all are of one
        split because of a file's name."""
        return folder / "units" / f"{self.number:06d}.hashes"

    def remove_leftovers(self, folder: Path) -> None:
        for split in SPLITS:
            for path in folder.glob(f"{split}_{self.number:06d}_*"):
                path.unlink()
        for path in (*folder.glob(f"units/{self.number:06d}.*.tmp*"), self.hashes_path(folder)):
            path.unlink(missing_ok=True)


# --- one document ---


def is_validation(hashed: int, settings: Settings) -> bool:
    return hashed < (settings.val_fraction * 2**64 if settings.val_below is None else settings.val_below)


class Origin(NamedTuple):
    """Of a document."""

    split: str
    hashed: int
    place: str  # for messages
    file: str | None = None  # its name, if the file is the document


def origin_of(unit: Unit, settings: Settings, path: str, name: str, number: int, hashed: int) -> Origin:
    """hashed: of what the document holds."""
    split = unit.split or ("val" if is_validation(hashed, settings) else "train")
    # rows of parquet are counted from the beginning of the file, lines from that of the part
    counted = f" from byte {unit.span[0]:,} on" if unit.span and not path.endswith(".parquet") else ""
    place = f"{path}, record {number}{counted}"
    return Origin(split, hashed, place, name if is_one_document(Path(name)) else None)


# --- one unit ---


def read_unit(unit: Unit, text_key: str) -> Iterator[tuple[str, str, int, Iterable[str] | BadRecord]]:
    """(path, name, number, document) of every record, as read_records() gives them."""
    for path, name in unit.files:
        for number, document in read_records(Path(path), text_key, unit.span):
            yield path, name, number, document


def encode_batch(
    batch: list[tuple[Origin, str]], tokenizer: Tokenizer, reject: Callable[[str], None]
) -> Iterator[tuple[Origin, list[np.ndarray]]]:
    """(origin, [ids]) of each (origin, text) that can be encoded; reject is told of the others."""
    texts = [text for _, text in batch]
    encoded: list[np.ndarray | None] = []
    try:
        encoded += tokenizer.encode_arrays(texts)
    except EncodeError:  # one by one, to learn which of them it was
        for origin, text in batch:
            try:
                encoded += tokenizer.encode_arrays([text])
            except EncodeError as error:
                reject(f"{origin.place}: {error}")
                encoded.append(None)
    for (origin, _), ids in zip(batch, encoded, strict=True):
        if ids is not None:
            yield origin, [ids]


def encode_unit(
    unit: Unit, tokenizer: Tokenizer, settings: Settings, reject: Callable[[str], None]
) -> Iterator[tuple[Origin, Iterable[np.ndarray]]]:
    """(origin, pieces of ids) of every document, in order."""
    batch: list[tuple[Origin, str]] = []
    chars = 0
    for path, name, number, document in read_unit(unit, settings.text_key):
        if isinstance(document, BadRecord):
            reject(str(document))
            continue
        origin = origin_of(unit, settings, path, name, number, hash_document(path, document))
        # the text of a short document; a file of text is read in chunks, so its length is not known
        short = document[0] if isinstance(document, list) and len(document[0]) <= 2 * PIECE_CHARS else None
        if batch and (short is None or chars + len(short) > PIECE_CHARS):
            yield from encode_batch(batch, tokenizer, reject)
            batch, chars = [], 0
        if short is not None:
            batch.append((origin, short))
            chars += len(short)
            continue
        try:
            yield origin, read_pieces(path, document, tokenizer.encode)
        except (BadRecord, EncodeError) as error:
            reject(f"{origin.place}: {error}")
    yield from encode_batch(batch, tokenizer, reject)


def token_unit(
    unit: Unit, settings: Settings, reject: Callable[[str], None]
) -> Iterator[tuple[Origin, list[np.ndarray], np.ndarray]]:
    """(origin, [ids], lengths of the documents in them) of every sample of token ids, in order."""
    assert settings.tokens and settings.bytes_dtype, settings
    columns = (settings.tokens, settings.lengths, settings.split_at, settings.bytes_dtype)
    for path, name in unit.files:
        for number, ids, lengths in read_tokens(Path(path), *columns, reject):
            hashed = hash_content([ids.tobytes()])
            yield origin_of(unit, settings, path, name, number, hashed), [ids], lengths


class Output:
    """The token files of one unit. It is full when it holds the unit's max_tokens. written is told of every
    tokens that are written."""

    def __init__(
        self, unit: Unit, folder: Path, settings: Settings, vocab_size: int, written: Callable[[int], None]
    ):
        self.writers = {
            split: ShardWriter(folder, split, unit.number, settings.shard_tokens, vocab_size)
            for split in SPLITS
        }
        self.start = [] if settings.bos_id is None else [np.array([settings.bos_id], dtype=np.uint32)]
        self.end = np.array([] if settings.eot_id is None else [settings.eot_id], dtype=np.uint32)
        self.max_tokens, self.tokens, self.written = unit.max_tokens, 0, written
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
        self.written(self.waiting_tokens)
        self.waiting_tokens = 0

    def finish(self) -> dict:
        self.write()
        return {name: file for writer in self.writers.values() for name, file in writer.finish().items()}

    def abandon(self) -> None:
        for writer in self.writers.values():
            writer.abandon()


def give_names(folder: Path, names: list[str]) -> None:
    """The complete token files, which have .tmp after their names, get them."""
    for name in names:
        sync(folder / f"{name}.tmp")
    for name in names:
        os.replace(folder / f"{name}.tmp", folder / name)
    sync_folder(folder)


def tokenize(
    unit: Unit,
    folder: Path,
    tokenizer: Tokenizer,
    settings: Settings,
    max_bad: int,
    written: Callable[[int], None] = lambda tokens: None,
) -> dict:
    """Make the unit's token files; returns its manifest. written is told of tokens as they are written."""
    unit.remove_leftovers(folder)
    output = Output(unit, folder, settings, tokenizer.vocab_size, written)
    counts = {"documents": 0, "empty": 0, "bad": 0}
    bad_records: list[str] = []

    def reject(reason: str) -> None:
        counts["bad"] += 1
        if counts["bad"] > max_bad + BAD_LISTED:  # fewer are reported together with those of other units
            raise UserError(f"more than --max_bad={max_bad} bad records, such as: {reason}")
        bad_records.append(reason)
        del bad_records[BAD_LISTED:]

    hashes, val_files, val_documents = array("Q"), [], 0
    try:
        documents: Iterator = encode_unit(unit, tokenizer, settings, reject)
        if settings.tokens:
            documents = token_unit(unit, settings, reject)
        while not output.full and (document := next(documents, None)) is not None:
            origin, pieces, *lengths = document
            pieces = iter(pieces)
            first = next(pieces)
            if len(first) == 0:
                counts["empty"] += 1
                continue
            output.add(origin.split, chain([first], pieces), *lengths)
            counts["documents"] += 1
            hashes.append(origin.hashed)
            val_documents += origin.split == "val"
            if origin.file and origin.split == "val":
                val_files.append(origin.file)
        files = output.finish()
        if settings.tokens:  # what was counted is samples
            counts["documents"] = sum(file["lengths"]["documents"] for file in files.values())
        give_names(folder, with_lengths(files))
        if unit.split:
            write_bytes(unit.hashes_path(folder), np.array(hashes, "<u8").tobytes())
    except BaseException:
        output.abandon()
        unit.remove_leftovers(folder)
        raise
    manifest = {**counts, "bad_records": bad_records, "files": files}
    manifest |= {"val_files": val_files, "val_documents": val_documents}
    write_json(unit.manifest_path(folder), manifest)
    dtype = smallest_dtype(tokenizer.vocab_size)
    remember_files(folder, dtype, files)
    return manifest
