"""The tokenizer that a preparation trains on its own text, before it makes the tokens.

It learns from the documents that will be for training, never from those for validation. The same input and
settings give the same tokenizer. tokenizer_training.json, written last, says from what it was made, so the
same command again, also after a kill, takes the tokenizer that is there.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from data.pipeline.bad_records import BAD_LISTED, too_many_bad
from data.pipeline.documents import BadRecord, hash_document, is_one_document, read_records
from data.pipeline.folder_lock import only_preparation
from data.pipeline.part_documents import halves
from data.pipeline.parts import Part, Settings, plan_parts
from data.pipeline.preparation import Job, begun_otherwise, delete_dataset, with_threshold
from data.tokenizers.bpe_training import EOT_ID, train_bpe
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.json_file import file_hash
from data.tokenizers.to_file import FILE, write_content

RECORD = "tokenizer_training.json"
MOST_BYTES = 10**9  # of text, to learn from: more changes few merges, and the words are held in memory
PIECE_CHARS = 1 << 18  # the library collects 256 pieces before it looks at them
# With fewer bytes of text for each id, most ids are so rare that a model learns little about them: an id
# stands for about 4 bytes, so it occurs 100 times on average.
BYTES_PER_ID = 400


def make_tokenizer(
    files: list[Path],
    folder: Path,
    vocab_size: int,
    eot: str,
    settings: Settings,
    job: Job,
    most_bytes: int = MOST_BYTES,
) -> FileTokenizer:
    """The tokenizer in this folder; it is trained if it is not there. settings: of the dataset, with the
    eot_id of trained tokenizers."""
    assert settings.eot_id == EOT_ID, settings
    parts, listing = plan_parts(files, settings)
    made_of = {"vocab_size": vocab_size, "eot": eot, "most_bytes": most_bytes, "input": listing}
    made_of |= {"val_fraction": settings.val_fraction, "text_key": settings.text_key, "split_by": "text"}
    decisive = {"splits": settings.splits != "names", "max_tokens": settings.max_tokens is not None}
    made_of |= {name: getattr(settings, name) for name, is_said in decisive.items() if is_said}
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        if not job.resume:
            delete_dataset(folder)
            (folder / RECORD).unlink(missing_ok=True)
        if not _is_there(folder, made_of):
            settings = with_threshold(settings, parts)
            documents = training_documents(parts, settings, job.max_bad, most_bytes)
            content = _train(pieces(documents, most_bytes), vocab_size, eot)
            write_content(folder, content, EOT_ID)
            write_json(folder / RECORD, {**made_of, "sha256": file_hash(folder / FILE)})
        return FileTokenizer(folder / FILE)


def _is_there(folder: Path, made_of: dict[str, Any]) -> bool:
    """Whether the folder's tokenizer was made of this. UserError if the folder holds tokens of another one:
    nothing of them may change."""
    recorded: dict[str, Any] = {}
    try:
        recorded = read_json(folder / RECORD)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / RECORD} is damaged ({error}); --no-resume deletes what is there"
        ) from None
    differ = [key for key in made_of if recorded.get(key) != made_of[key]]
    if differ and ((folder / "plan.json").exists() or any(folder.glob("*.bin"))):
        raise begun_otherwise(folder, differ if recorded else ["tokenizer"])
    return not differ and (folder / FILE).is_file() and file_hash(folder / FILE) == recorded.get("sha256")


def _train(texts: Iterable[str], vocab_size: int, eot: str) -> str:
    size = 0

    def counted() -> Iterator[str]:
        nonlocal size
        for text in texts:
            size += len(text.encode())
            yield text

    print(f"training a tokenizer of {vocab_size:,} ids", flush=True)
    content, ids = train_bpe(counted(), vocab_size, eot)
    print(f"trained it on {size / 1e6:,.1f} MB of text")
    if ids < vocab_size:
        print(f"warning: it has {ids:,} ids, not {vocab_size:,}: no other pair occurs twice in the text")
    elif size < BYTES_PER_ID * vocab_size:
        fitting = max(512, size // BYTES_PER_ID // 64 * 64)
        print(f"warning: little text for {vocab_size:,} ids, so many will be rare; {fitting:,} would fit it")
    return content


# --- the text ---


def training_documents(
    parts: list[Part], settings: Settings, max_bad: int, most_bytes: int
) -> Iterator[Iterable[str]]:
    """The documents for training, in their order; of very much text an even part of about most_bytes. A file
    of text that is left out is not even opened. Of an only document, it is the beginning."""
    every = max(1, math.ceil(sum(part.text_size for part in parts) / most_bytes))
    for split, path, document in islice(_documents(parts, settings, max_bad, every), 0, None, every):
        if settings.cut:
            yield halves(path, document, 1 - settings.val_fraction)[0]
        elif split == "train" or split is None and hash_document(path, document) >= settings.below:
            yield document


def _documents(
    parts: list[Part], settings: Settings, max_bad: int, every: int
) -> Iterator[tuple[str | None, str, Iterable[str]]]:
    """(split that a name says, path, document) of all documents, of which every k-th is used."""
    good = bad = 0
    listed: list[str] = []  # of very many bad ones, the first
    for part, (path, _, split, _) in ((each, file) for each in parts for file in each.files):
        unused = good % every and is_one_document(Path(path))
        for _, document in [(1, [])] if unused else read_records(Path(path), settings.text_key, part.span):
            if not isinstance(document, BadRecord):
                good += 1
                yield split, path, document
                continue
            bad += 1
            listed = [*listed, str(document)][:BAD_LISTED]
    if bad > max_bad:
        raise too_many_bad(bad, listed, max_bad)


def pieces(documents: Iterable[Iterable[str]], most_bytes: int) -> Iterator[str]:
    """The text of the documents in short pieces, until they have most_bytes."""
    left = most_bytes
    for document in documents:
        for text in document:
            for start in range(0, len(text), PIECE_CHARS):
                if left <= 0:
                    return
                piece = text[start : start + PIECE_CHARS]
                left -= len(piece.encode())
                yield piece
