"""The documents of a part: read with their splits, encoded, and cut where max_tokens ends."""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.pipeline.conversations import Chat, open_template
from data.pipeline.document_pieces import PIECE_CHARS, read_pieces
from data.pipeline.documents import BadRecord, hash_content, hash_document, read_records
from data.pipeline.mds import read_tokens
from data.pipeline.parts import Part, Settings, shares_of
from data.pipeline.token_files import SPLITS
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer


class Document(NamedTuple):
    file: int  # number of its file in the part
    path: str
    split: str
    hashed: int
    place: str  # for messages
    # a list of one string, or the chunks of a file of text; of an MDS sample, the ids of the documents in it
    content: Iterable[Any]


def documents(
    part: Part,
    settings: Settings,
    reject: Callable[[str], None],
    wanted: Callable[[int], bool] = lambda file: True,
) -> Iterator[Document]:
    """Every document, in order, with its split; reject is told of every record that holds none. Nothing more
    is read of a file, by its number, that is not wanted any more."""
    columns, text_key = settings.columns, None if settings.chat else settings.text_key
    for file, (path, _, named, _) in enumerate(part.files):
        # rows of parquet are counted from the beginning of the file, lines from that of the part
        counted = f" from byte {part.span[0]:,} on" if part.span and not path.endswith(".parquet") else ""
        records: Iterator[tuple[int, Any]] = (
            read_tokens(Path(path), columns) if columns else read_records(Path(path), text_key, part.span)
        )
        while wanted(file) and (record := next(records, None)):
            number, content = record
            place = f"{path}, record {number}{counted}"
            if isinstance(content, BadRecord):
                reject(str(content))
            elif settings.cut:
                for split, half in zip(SPLITS, halves(path, content, settings.val_fraction), strict=True):
                    yield Document(file, path, split, 0, place, half)
            else:
                ids = columns and hash_content(map(np.ndarray.tobytes, content))
                hashed = hash_document(path, content) if ids is None else ids
                split = named or ("val" if hashed < settings.below else "train")
                yield Document(file, path, split, hashed, place, content)


def halves(path: str, text: Iterable[str], val_fraction: float) -> tuple[Iterator[str], Iterator[str]]:
    """All but about this fraction of a document, and the rest. The first must be read before the second."""
    # a file's size counts bytes, that of a string characters
    in_memory = isinstance(text, list)
    size = len(text[0]) if isinstance(text, list) else os.path.getsize(path)
    left, chunks, rest = min(max(1, int((1 - val_fraction) * size)), size - 1), iter(text), ""

    def beginning() -> Iterator[str]:
        nonlocal left, rest
        while left > 0 and (chunk := next(chunks, None)) is not None:
            here = chunk[:left] if in_memory else chunk.encode()[:left].decode(errors="ignore")
            left -= len(chunk if in_memory else chunk.encode())
            rest = chunk[len(here) :]
            yield here

    def end() -> Iterator[str]:
        yield rest
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
    documents: Iterable[Document], chat: Chat, counts: Counter[str], reject: Callable[[str], None]
) -> Iterator[tuple[Document, list[np.ndarray]]]:
    """(conversation, ids) of each document that it becomes. A bad one gives none."""
    template = open_template(chat.folder)
    for document in documents:
        found: Counter[str] = Counter()
        try:
            made = list(template.documents(next(iter(document.content)), chat, found))
        except BadRecord as error:
            reject(f"{document.place}: {error}")
            continue
        counts.update(found)
        yield from ((document, [ids]) for ids in made)


def hashes_of(parts: list[Part], settings: Settings) -> Iterator[int]:
    """The hash of every document or MDS sample."""
    found = chain.from_iterable(documents(part, settings, lambda reason: None) for part in parts)
    return (document.hashed for document in found if settings.columns or document.content != [""])


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
