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
from data.pipeline.documents import BadRecord, is_one_document, read_records
from data.pipeline.folder_lock import one_at_a_time, one_part
from data.pipeline.preparation import Job, delete_dataset, plan_units
from data.pipeline.units import Settings, Unit, split_of_document
from data.tokenizers.bpe_training import EOT_ID, train_bpe
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.to_file import FILE, write_content
from data.tokenizers.tokenizer import file_hash

RECORD = "tokenizer_training.json"
MOST_BYTES = 10**9  # of text, to learn from: more changes few merges, and the words are held in memory
# Bytes of text in a byte on disk, about: to choose every k-th document before any is read
EXPANSION = {".gz": 4, ".zst": 4, ".parquet": 3}
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
    units, listing = plan_units(files, None, None)
    made_of = {"vocab_size": vocab_size, "eot": eot, "most_bytes": most_bytes, "input": listing}
    made_of |= {"val_fraction": settings.val_fraction, "text_key": settings.text_key}
    folder.mkdir(parents=True, exist_ok=True)
    with one_part(folder, job.part, job.num_parts), one_at_a_time(folder):
        if not job.resume:
            delete_dataset(folder)
            (folder / RECORD).unlink(missing_ok=True)
        if not _is_there(folder, made_of):
            documents = every_kth(training_documents(units, settings, job.max_bad), units, most_bytes)
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
        raise UserError(
            f"{folder} was begun with another {', '.join(differ) if recorded else 'tokenizer'}; pass what it "
            "was begun with, another --output, or --no-resume to delete what is there"
        )
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


def training_documents(units: list[Unit], settings: Settings, max_bad: int) -> Iterator[Iterable[str]]:
    """The documents for training, in their order. As empty_split.fill_empty_split() does, a split that would
    get none gets the last document, and an only document is cut: its beginning is for training."""
    bad, seen = 0, 0
    last: dict[str, Iterable[str] | None] = {"train": None, "val": None}  # of each split; not yet yielded
    for unit in units:
        for path, name in unit.files:
            for number, document in read_records(Path(path), text_key=settings.text_key):
                if isinstance(document, BadRecord):
                    bad += 1
                    if bad > max_bad:
                        raise UserError(
                            f"more than --max_bad={max_bad} bad records; repair or allow more: {document}"
                        )
                    continue
                split = split_of_document(unit, name, number, settings.val_fraction)
                if split == "train" and last["train"] is not None:
                    yield last["train"]
                last[split] = document
                seen += 1
    if seen == 1:
        document = last["train"] or last["val"] or []
        yield beginning(document, units, 1 - settings.val_fraction)
    elif last["train"] is None and last["val"] is not None:
        yield last["val"]
    elif last["train"] is not None and last["val"] is not None:
        yield last["train"]


def beginning(document: Iterable[str], units: list[Unit], share: float) -> Iterator[str]:
    """About this share of the only document."""
    path = Path(units[0].files[0][0])
    if not is_one_document(path):
        (text,) = document
        yield text[: int(share * len(text))]
        return
    left = int(share * path.stat().st_size)
    for text in document:
        yield text.encode()[:left].decode(errors="ignore")
        left -= len(text.encode())
        if left <= 0:
            return


def every_kth(
    documents: Iterator[Iterable[str]], units: list[Unit], most_bytes: int
) -> Iterator[Iterable[str]]:
    """An even part of the documents that has about most_bytes of text. A file of text that is left out is not
    even opened."""
    paths = [Path(path) for unit in units for path, _ in unit.files]
    size = sum(path.stat().st_size * EXPANSION.get(path.suffix, 1) for path in paths)
    return islice(documents, 0, None, max(1, math.ceil(size / most_bytes)))


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
