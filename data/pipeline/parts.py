"""The parts of an input: the plan of a preparation.

A part is some small files, one file, or a span of a large .jsonl or .parquet file. One process makes it
(data/pipeline/part_writer.py): its token files, and then parts/NUMBER.json, which says what they hold. A part
without it is made again from its beginning. The bytes depend only on the input and the settings, so they are
the same for any number of workers and after any interruption.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import NamedTuple

from data.pipeline import conversations
from data.pipeline.conversations import Chat
from data.pipeline.documents import TEXT_KEY
from data.pipeline.hub import Hub
from data.pipeline.mds import Columns
from data.pipeline.splits import splits_of_files
from data.pipeline.token_files import MASKED, SPLITS, smallest_dtype

PART_BYTES = 32 << 20  # of text: seconds of work, which are repeated after a kill
PARTS = 4096  # about so many at most: each start of a training checks the files of all of them
# Bytes of text in a byte on disk, about: a zstd archive has three of prose, eight of code
EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}
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
    files_read = [file for file in map(File, map(str, paths), names, splits, sizes) if file.split != "test"]
    groups: list[tuple[list[File], tuple[int, int] | None]] = []
    room = -1  # bytes of text that the last group may still get
    for file in files_read:
        text = text_size(file.path, file.size)
        divided = file.path.endswith((".jsonl", ".parquet")) and not isinstance(store, Hub)
        pieces = -(-text // max(most, PART_BYTES)) if divided else 1
        if pieces > 1:
            spans = pairwise(file.size * k // pieces for k in range(pieces + 1))
            groups += [([file._replace(size=after - first)], (first, after)) for first, after in spans]
            room = -1
        elif text <= room:
            groups[-1][0].append(file)
            room -= text
        else:
            groups.append(([file], None))
            room = most - text
    alone = len(groups) == 1
    parts = [Part(k, tuple(group), span, alone=alone) for k, (group, span) in enumerate(groups)]
    if settings.max_tokens is not None:
        shares = pairwise([0, *shares_of(settings.max_tokens, [part.size for part in parts])])
        pairs = zip(parts, shares, strict=True)
        parts = [part._replace(max_tokens=after - first) for part, (first, after) in pairs]
    listing = [names, sizes, [(len(group), span) for group, span in groups]]
    return parts, hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def shares_of(total: int, sizes: list[int]) -> list[int]:
    """How much of the total is for the first, for the first two, ..., for all things of these sizes."""
    ends = list(accumulate(sizes))
    return [total * end // max(1, ends[-1]) for end in ends]
