"""The parts of an input, and the token files of a part. Nothing else writes token files.

A part is some small files, one file, or a span of a large .jsonl or .parquet file. One process writes its
token files, which get their names when all of them are complete and on disk, and then parts/NUMBER.json,
which says what they hold. A part without it is made again from its beginning. The bytes depend only on the
input and the settings, so they are the same for any number of workers and after any interruption.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedWriter
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.durable_file import create, sync, sync_folder, write_bytes, write_json
from common.errors import UserError
from data.pipeline import conversations
from data.pipeline.bad_records import BAD_LISTED
from data.pipeline.conversations import Chat, ChatTemplate
from data.pipeline.document_pieces import PIECE_CHARS, read_pieces
from data.pipeline.documents import (
    TEXT_KEY,
    BadRecord,
    hash_content,
    hash_document,
    is_one_document,
    read_records,
)
from data.pipeline.hub import Hub
from data.pipeline.mds import Columns, read_tokens
from data.pipeline.splits import splits_of_files
from data.pipeline.token_files import (
    LENGTH_DTYPE,
    MASKED,
    SPLITS,
    largest_id,
    lengths_name,
    plain_ids,
    smallest_dtype,
    stored_dtype,
)
from data.pipeline.verified import remember_files
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer

PART_BYTES = 32 << 20  # of text: seconds of work, which are repeated after a kill
PARTS = 4096  # about so many at most: each start of a training checks the files of all of them
# Bytes of text in a byte on disk, about: a zstd archive has three of prose, eight of code
EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}
WRITE_TOKENS = 1 << 18  # tokens collected before they are written
MOST_FILES = 1000  # of one split of one part: their names have three digits, and are read in sorted order
COUNTS = ("documents", "empty", "bad")


@dataclass(frozen=True)
class Settings:
    """All that the bytes of a dataset depend on, apart from the input and the tokenizer."""

    eot_id: int | None  # that ends each document; None: document lengths are stored beside the tokens
    bos_id: int | None
    val_fraction: float
    shard_tokens: int  # most tokens of a file
    max_tokens: int | None = None
    text_key: str = TEXT_KEY
    splits: str = "names"  # of files of many documents; "ignore": their names say nothing
    columns: Columns | None = None  # of MDS shards that hold token ids
    chat: Chat | None = None  # the documents are conversations
    # What follows from these and the input (data/pipeline/splits.py)
    val_below: int | None = None  # hashes of documents for validation; None: val_fraction of all hashes
    cut: bool = False  # the input is one document, whose end is for validation

    @property
    def counts(self) -> tuple[str, ...]:
        """What the manifest of a part counts, and meta.json of all parts."""
        return COUNTS + (conversations.COUNTS if self.chat else ())

    @property
    def with_lengths(self) -> bool:
        """Whether document lengths are stored beside the tokens."""
        return bool(self.columns or self.chat)

    def dtype(self, vocab_size: int) -> str:
        """Of the token files."""
        return MASKED if self.chat else smallest_dtype(vocab_size)

    @property
    def below(self) -> int:
        """A document is for validation if its hash is below this."""
        return math.ceil(self.val_fraction * 2**64) if self.val_below is None else self.val_below


class File(NamedTuple):
    path: str
    name: str  # the same on every machine
    split: str | None  # None: the hash of each document decides
    size: int  # bytes on disk of what is read of it


class Part(NamedTuple):
    number: int
    files: tuple[File, ...]
    span: tuple[int, int] | None = None  # (first byte, byte after the last) of a file that is divided
    max_tokens: int | None = None
    alone: bool = False  # there is no other part: its files are train.bin and val.bin

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def text_size(self) -> int:
        """About how many bytes of text; nothing is read for it."""
        return sum(text_size(file.path, file.size) for file in self.files)

    @property
    def stems(self) -> dict[str, str]:
        """{split: what the names of its token files begin with}"""
        return {split: split if self.alone else f"{split}_{self.number:06d}" for split in SPLITS}

    def manifest(self, folder: Path) -> Path:
        return folder / "parts" / f"{self.number:06d}.json"

    def hashes(self, folder: Path, split: str) -> Path:
        """The hashes of the documents, little-endian uint64, of files whose names say this split."""
        return folder / "parts" / f"{self.number:06d}.{split}"

    def remove(self, folder: Path) -> None:
        """Deletes all that was written of it."""
        patterns = [f"parts/{self.number:06d}.*", *(f"{stem}*.bin*" for stem in self.stems.values())]
        for path in chain.from_iterable(map(folder.glob, patterns)):
            path.unlink()


# --- the plan ---


def text_size(path: str | Path, size: int) -> int:
    return size * EXPANSION.get(Path(path).suffix, 1)


def plan_parts(
    files: list[Path], settings: Settings, store: Hub | None = None, part_bytes: int | None = None
) -> tuple[list[Part], str]:
    """The parts, and a hash of what decides them: names and sizes of the files, and how they are divided.

    max_tokens is divided among the parts by their size, without a remainder; the dataset has fewer tokens
    only if the text of a part has fewer than its share. Downloads are not divided: each part fetches and
    deletes its own files. part_bytes: of text in a part of several files.
    """
    # abspath does not follow links: in the hub's cache, the file that a link points to has another name
    paths = [Path(os.path.abspath(path)) for path in files]
    root = Path(os.path.commonpath([path.parent for path in paths]))
    names = [path.relative_to(root).as_posix() for path in paths]
    sizes = [os.path.getsize(path) if store is None else store.size(path) for path in paths]
    most = part_bytes or max(PART_BYTES, sum(map(text_size, paths, sizes)) // PARTS)
    splits = splits_of_files(names, settings.splits == "ignore")
    groups: list[tuple[list[File], tuple[int, int] | None]] = []
    room = -1  # bytes of text that the last group may still get
    for path, name, size, split in zip(paths, names, sizes, splits, strict=True):
        if split == "test":
            continue
        text = text_size(path, size)
        divided = path.suffix in (".jsonl", ".parquet") and not isinstance(store, Hub)
        pieces = -(-text // max(most, PART_BYTES)) if divided else 1
        if pieces > 1:
            ends = [size * k // pieces for k in range(pieces + 1)]
            spans = zip(ends, ends[1:], strict=False)
            groups += [([File(str(path), name, split, span[1] - span[0])], span) for span in spans]
            room = -1
        elif text <= room:
            groups[-1][0].append(File(str(path), name, split, size))
            room -= text
        else:
            groups.append(([File(str(path), name, split, size)], None))
            room = most - text
    parts = [Part(k, tuple(group), span) for k, (group, span) in enumerate(groups)]
    if len(parts) == 1:
        parts = [parts[0]._replace(alone=True)]
    if settings.max_tokens is not None:
        shares = shares_of(settings.max_tokens, [part.size for part in parts])
        first = (0, *shares)
        parts = [part._replace(max_tokens=shares[k] - first[k]) for k, part in enumerate(parts)]
    listing = [names, sizes, [(len(group), span) for group, span in groups]]
    return parts, hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def shares_of(total: int, sizes: list[int]) -> list[int]:
    """How much of the total is for the first, for the first two, ..., for all things of these sizes."""
    ends = list(accumulate(sizes))
    return [total * end // max(1, ends[-1]) for end in ends]


# --- the documents of a part ---


class Document(NamedTuple):
    file: int  # number of its file in the part
    path: str
    split: str
    hashed: int
    place: str  # for messages
    # a list of one string, or the chunks of a file of text; of an MDS sample, the ids of the documents in it
    content: Iterable[Any]

    @property
    def most_tokens(self) -> int:
        """It has hardly more: a token is at least a byte, and some begin or end a document."""
        if not isinstance(self.content, list):
            return os.path.getsize(self.path) + 3
        return sum(len(each.encode()) + 3 if isinstance(each, str) else len(each) for each in self.content)


def documents(
    part: Part,
    settings: Settings,
    reject: Callable[[str], None],
    wanted: Callable[[int], bool] = lambda file: True,
) -> Iterator[Document]:
    """Every document, in order, with its split; reject is told of every record that holds none. Nothing more
    is read of a file, by its number, that is not wanted any more."""
    columns, share = settings.columns, 1 - settings.val_fraction
    for file, (path, _, named, _) in enumerate(part.files):
        if not wanted(file):
            continue
        # rows of parquet are counted from the beginning of the file, lines from that of the part
        counted = f" from byte {part.span[0]:,} on" if part.span and not path.endswith(".parquet") else ""
        records: Iterator[tuple[int, Any]] = read_records(
            Path(path), None if settings.chat else settings.text_key, part.span
        )
        if columns:
            records = read_tokens(Path(path), columns)
        for number, content in records:
            place = f"{path}, record {number}{counted}"
            if isinstance(content, BadRecord):
                reject(str(content))
            elif settings.cut:
                for split, half in zip(SPLITS, halves(path, content, share), strict=True):
                    yield Document(file, path, split, 0, place, half)
            else:
                hashed = (
                    hash_content(map(np.ndarray.tobytes, content))
                    if columns
                    else hash_document(path, content)
                )
                split = named or ("val" if hashed < settings.below else "train")
                yield Document(file, path, split, hashed, place, content)
            if not wanted(file):
                break


def halves(path: str, text: Iterable[str], share: float) -> tuple[Iterator[str], Iterator[str]]:
    """About this share of a document, and the rest. The first must be read before the second."""
    size = len(text[0]) if isinstance(text, list) else os.path.getsize(path)
    left, chunks, rest = min(max(1, int(share * size)), size - 1), iter(text), [""]

    def beginning() -> Iterator[str]:
        nonlocal left
        while left > 0 and (chunk := next(chunks, None)) is not None:
            # a file's size counts bytes, that of a string characters
            used = left if isinstance(text, list) else len(chunk.encode()[:left].decode(errors="ignore"))
            left -= len(chunk) if isinstance(text, list) else len(chunk.encode())
            rest[0] = chunk[used:]
            yield chunk[:used]

    def end() -> Iterator[str]:
        yield rest[0]
        yield from chunks

    return beginning(), end()


def encode(
    documents: Iterable[Document], tokenizer: Tokenizer, reject: Callable[[str], None]
) -> Iterator[tuple[Document, Iterable[np.ndarray]]]:
    """(document, pieces of its ids), in order. Short documents are encoded together."""
    batch: list[tuple[Document, str]] = []
    chars = 0
    for document in documents:
        text = document.content  # a file of text is read in chunks, so its length is not known
        short = text[0] if isinstance(text, list) and len(text[0]) <= 2 * PIECE_CHARS else None
        if batch and (short is None or chars + len(short) > PIECE_CHARS):
            yield from _encode_batch(batch, tokenizer, reject)
            batch, chars = [], 0
        if short is not None:
            batch.append((document, short))
            chars += len(short)
            continue
        try:
            yield document, read_pieces(document.path, text, tokenizer.encode)
        except (BadRecord, EncodeError) as error:
            reject(f"{document.place}: {error}")
    yield from _encode_batch(batch, tokenizer, reject)


def _encode_batch(
    batch: list[tuple[Document, str]], tokenizer: Tokenizer, reject: Callable[[str], None]
) -> Iterator[tuple[Document, list[np.ndarray]]]:
    try:
        encoded = tokenizer.encode_arrays([text for _, text in batch])
    except EncodeError as error:
        if len(batch) == 1:
            reject(f"{batch[0][0].place}: {error}")
        else:  # one by one, to learn which of them it was
            for one in batch:
                yield from _encode_batch([one], tokenizer, reject)
        return
    for (document, _), ids in zip(batch, encoded, strict=True):
        yield document, [ids]


def encode_chats(
    documents: Iterable[Document], chat: Chat, counts: dict[str, int], reject: Callable[[str], None]
) -> Iterator[tuple[Document, list[np.ndarray]]]:
    """(conversation, ids) of each document that it becomes. A bad one gives none."""
    template = ChatTemplate(chat.folder)
    for document in documents:
        try:
            made = list(template.documents(next(iter(document.content)), chat, counts))
        except BadRecord as error:
            reject(f"{document.place}: {error}")
            continue
        yield from ((document, [ids]) for ids in made)


def hashes_of(parts: list[Part], settings: Settings) -> Iterator[int]:
    """The hash of every document or MDS sample; with max_tokens, of those that are certainly among the first
    so many."""
    for part in parts:
        budget = Budget(part, settings)
        for document in documents(part, settings, lambda reason: None, budget.wanted):
            if settings.columns or document.content != [""]:
                yield document.hashed
            budget.taken += document.most_tokens


class Budget:
    """The tokens that a part may still take of its max_tokens: of each file a share by its size. What a file
    does not use is for the next ones, and its last document may exceed the share a little."""

    def __init__(self, part: Part, settings: Settings):
        self.settings = settings
        self.most = sys.maxsize if part.max_tokens is None else part.max_tokens
        self.shares = shares_of(self.most, [max(1, file.size) for file in part.files])
        self.taken = 0

    def wanted(self, file: int) -> bool:
        return self.taken < self.shares[file]

    def room(self, document: Document) -> int:
        # of an only document, the end is for validation
        is_beginning = self.settings.cut and document.split == "train"
        kept = math.ceil(self.most * self.settings.val_fraction) if is_beginning else 0
        return min(self.most, self.shares[document.file] + self.most // 256) - self.taken - kept

    def take(self, document: Document, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """The ids of a document between those that begin and end it. If it does not fit it is cut, and the
        last one is its end. Between the halves of a document there is none."""
        ends = (self.settings.bos_id, self.settings.eot_id)
        first, last = (np.array([] if each is None else [each], np.uint32) for each in ends)
        if self.settings.cut:
            first, last = (first, last[:0]) if document.split == "train" else (first[:0], last)
        room = self.room(document) - len(last)
        for ids in chain([first], pieces):
            self.taken += len(ids[:room])
            yield ids[:room]
            room -= len(ids[:room])
            if room == 0:
                break
        self.taken += len(last)
        yield last


# --- the files of a part ---


class SplitWriter:
    """Writes the tokens of one split into STEM.bin, or if they are more than a file may hold, into
    STEM_000.bin, STEM_001.bin and so on. Every name has .tmp after it. A file is made with its first token.

    The trap: numpy narrows 70000 to uint16 as 4464 without an error, which is another token."""

    def __init__(
        self, folder: Path, stem: str, vocab_size: int, most: int, with_lengths: bool, dtype: str | None
    ):
        self.folder, self.stem, self.vocab_size, self.most = folder, stem, vocab_size, most
        self.dtype = stored_dtype(dtype or smallest_dtype(vocab_size))
        self.waiting: list[np.ndarray | list[int]] = []
        self.waiting_tokens = self.tokens = 0
        self.ends = array("Q") if with_lengths else None  # of the documents, counted in tokens of the split
        self.file: BufferedWriter | None = None
        self.sha256 = hashlib.sha256()
        self.files: list[dict] = []  # what meta.json says of each

    def add(self, ids: np.ndarray | list[int]) -> None:
        if len(ids):
            self.waiting.append(ids)
            self.waiting_tokens += len(ids)

    def end_document(self) -> None:
        if self.ends is not None:
            self.ends.append(self.tokens + self.waiting_tokens)

    def write(self) -> None:
        if not self.waiting:
            return
        ids = np.concatenate(self.waiting)
        assert ids.ndim == 1 and ids.dtype.kind in "iu", (ids.shape, ids.dtype)
        plain = plain_ids(ids) if self.dtype.kind == "i" else ids
        low, high = int(plain.min()), int(plain.max())
        if low < 0 or high >= self.vocab_size:
            raise UserError(
                f"token id {low if low < 0 else high} is outside the vocabulary (0 to {self.vocab_size - 1}) "
                f"and could be stored as another token; vocab_size={self.vocab_size} is not that of the "
                "tokenizer"
            )
        self.tokens += len(ids)
        self.waiting, self.waiting_tokens = [], 0
        while len(ids):
            file = self.file or self._open()
            written = self.files[-1]
            here = ids[: self.most - written["tokens"]]
            stored = here.astype(self.dtype).tobytes()
            file.write(stored)
            self.sha256.update(stored)
            written |= {"tokens": written["tokens"] + len(here), "sha256": self.sha256.hexdigest()}
            written["max_id"] = max(written["max_id"], largest_id(here))
            ids = ids[len(here) :]
            if written["tokens"] == self.most:
                self.close()

    def _open(self) -> BufferedWriter:
        if len(self.files) == MOST_FILES:
            raise UserError(
                f"--shard_tokens={self.most} makes more than {MOST_FILES:,} files of a part; use a larger one"
            )
        self.file = create(self.folder / f"{self._name(len(self.files))}.tmp")
        self.sha256 = hashlib.sha256()
        self.files.append({"tokens": 0, "sha256": "", "max_id": 0})
        return self.file

    def _name(self, number: int) -> str:
        return f"{self.stem}_{number:03d}.bin"

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def finish(self) -> dict[str, dict]:
        """{name: what meta.json says of the file}"""
        self.write()
        self.close()
        names = [self._name(number) for number in range(len(self.files))]
        if len(names) == 1:
            names = [f"{self.stem}.bin"]
            os.replace(self.folder / f"{self._name(0)}.tmp", self.folder / f"{names[0]}.tmp")
        if self.ends is not None:
            bounds = [0, *accumulate(file["tokens"] for file in self.files)]
            ends = np.union1d(np.array(self.ends, np.int64), bounds)  # the end of a file ends a document
            for name, file, first, after in zip(names, self.files, bounds, bounds[1:], strict=False):
                lengths = np.diff(ends[(first <= ends) & (ends <= after)])
                stored = lengths.astype(stored_dtype(LENGTH_DTYPE)).tobytes()
                with create(self.folder / f"{lengths_name(name)}.tmp") as opened:
                    opened.write(stored)
                file["lengths"] = {"documents": len(lengths), "longest": int(lengths.max())}
                file["lengths"]["sha256"] = hashlib.sha256(stored).hexdigest()
        return dict(zip(names, self.files, strict=True))


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
    limits = (vocab_size, most, with_lengths, dtype)
    writers = {split: SplitWriter(folder, stem, *limits) for split, stem in stems.items()}
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
            writers[split].end_document()
            count += 1
        files = {name: file for writer in writers.values() for name, file in writer.finish().items()}
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


def write_part(
    part: Part,
    folder: Path,
    tokenizer: Tokenizer,
    settings: Settings,
    max_bad: int,
    written: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict:
    """Makes the token files of a part, and its manifest, which is returned."""
    counts, val_documents = dict.fromkeys(settings.counts, 0), 0
    bad_records: list[str] = []
    val_files: list[str] = []
    hashes, budget = {split: array("Q") for split in SPLITS}, Budget(part, settings)

    def reject(reason: str) -> None:
        counts["bad"] += 1
        if counts["bad"] > max_bad + BAD_LISTED:  # fewer are reported together with those of other parts
            raise UserError(f"more than --max_bad={max_bad} bad records, such as: {reason}")
        bad_records.append(reason)
        del bad_records[BAD_LISTED:]

    def taken() -> Iterator[tuple[str, Iterator[np.ndarray]]]:
        nonlocal val_documents
        found = documents(part, settings, reject, budget.wanted)
        encoded: Iterator[tuple[Document, Iterable[np.ndarray]]] = encode(found, tokenizer, reject)
        if settings.columns:
            encoded = ((document, [ids]) for document in found for ids in document.content)
        elif settings.chat:
            encoded = encode_chats(found, settings.chat, counts, reject)
        for document, pieces in encoded:
            if not budget.wanted(document.file) or budget.room(document) < 1:
                continue
            pieces = iter(pieces)
            first = next(pieces)
            if settings.chat and len(first) > budget.room(document):
                continue  # a conversation is never cut by --max_tokens
            if len(first) == 0:
                counts["empty"] += 1
                continue
            yield document.split, budget.take(document, chain([first], pieces))
            file = part.files[document.file]
            if file.split:
                hashes[document.split].append(document.hashed)
            if settings.cut:  # neither half is a document
                counts["documents"] += document.split == "train"
                continue
            counts["documents"] += 1
            val_documents += document.split == "val"
            if document.split == "val" and not file.split and is_one_document(Path(file.name)):
                val_files.append(file.name)

    try:
        files = write_files(
            *(folder, part.stems, taken(), tokenizer.vocab_size, settings.shard_tokens),
            *(settings.with_lengths, settings.dtype(tokenizer.vocab_size), written),
        )
        names = [*files, *(lengths_name(name) for name, file in files.items() if "lengths" in file)]
        give_names(folder, names)
        for split, hashed in hashes.items():
            if hashed:
                write_bytes(part.hashes(folder, split), np.array(hashed, "<u8").tobytes())
    except BaseException:
        part.remove(folder)
        raise
    manifest = {**counts, "bad_records": bad_records, "files": files}
    manifest |= {"val_files": val_files, "val_documents": val_documents}
    write_json(part.manifest(folder), manifest)
    remember_files(folder, settings.dtype(tokenizer.vocab_size), files)
    return manifest
