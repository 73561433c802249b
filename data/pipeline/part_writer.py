"""Makes a part: its token files, and then its manifest, which says what they hold."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from common.durable_file import write_bytes, write_json
from common.errors import UserError
from data.pipeline.bad_records import BAD_LISTED
from data.pipeline.documents import is_one_document
from data.pipeline.part_documents import Budget, Document, documents, encode, encode_chats
from data.pipeline.parts import Part, Settings
from data.pipeline.token_files import SPLITS, described
from data.pipeline.token_writer import give_names, write_files
from data.pipeline.verified import entry, remember
from data.tokenizers.tokenizer import Tokenizer


def write_part(
    part: Part,
    folder: Path,
    tokenizer: Tokenizer,
    settings: Settings,
    max_bad: int,
    written: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict:
    """Makes the token files of a part, and its manifest, which is returned."""
    counts = Counter(dict.fromkeys((*settings.counts, "val_documents"), 0))
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
        found = documents(part, settings, reject, budget.wanted)
        encoded: Iterator[tuple[Document, Iterable[np.ndarray]]] = encode(found, tokenizer, reject)
        if settings.columns:
            encoded = ((document, [ids]) for document in found for ids in document.content)
        elif settings.chat:
            encoded = encode_chats(found, settings.chat, counts, reject)
        for document, pieces in encoded:
            split, file, room = document.split, part.files[document.file], budget.room(document)
            if not budget.wanted(document.file) or room < 1:
                continue
            pieces = iter(pieces)
            first = next(pieces)
            if settings.chat and len(first) > room:
                continue  # a conversation is never cut by --max_tokens
            if len(first) == 0:
                counts["empty"] += 1
                continue
            yield split, budget.take(document, chain([first], pieces))
            if settings.chat:
                counts["targets"] += int((first >= 0).sum())
            if file.split:
                hashes[split].append(document.hashed)
            counts["documents"] += not settings.cut or split == "train"  # two halves are one
            if split == "val" and not settings.cut:
                counts["val_documents"] += 1
                if not file.split and is_one_document(Path(file.name)):
                    val_files.append(file.name)

    dtype = settings.dtype(tokenizer.vocab_size)
    limits = (tokenizer.vocab_size, settings.shard_tokens, settings.with_lengths, dtype)
    try:
        files = write_files(folder, part.stems, taken(), *limits, written)
        listed = described(dtype, files)
        give_names(folder, listed)
        for split, hashed in hashes.items():
            if hashed:
                write_bytes(part.hashes(folder, split), np.array(hashed, "<u8").tobytes())
    except BaseException:
        part.remove(folder)
        raise
    manifest = {**counts, "bad_records": bad_records, "files": files, "val_files": val_files}
    write_json(part.manifest(folder), manifest)
    remember(folder, {name: entry(folder / name, file) for name, file in listed.items()})
    return manifest
