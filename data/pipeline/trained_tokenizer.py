"""The tokenizer that a preparation trains on its own text, before it makes the tokens.

It learns from the documents that will be for training, never from those for validation. The same input and
settings give the same tokenizer. tokenizer_training.json, written last, says from what it was made, so the
same command again, also after a kill, takes the tokenizer that is there.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from data.pipeline.bad_records import BAD_LISTED, too_many_bad
from data.pipeline.documents import is_one_document
from data.pipeline.folder_lock import only_preparation
from data.pipeline.part_documents import documents
from data.pipeline.parts import Part, Settings, plan_parts
from data.pipeline.preparation import begun_otherwise, delete_dataset, with_threshold
from data.pipeline.workers import Job
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
    files: list[Path], folder: Path, vocab_size: int, eot: str, settings: Settings, job: Job
) -> FileTokenizer:
    """The tokenizer in this folder; it is trained if it is not there. settings: of the dataset, with the
    eot_id of trained tokenizers."""
    assert settings.eot_id == EOT_ID, settings
    parts, listing = plan_parts(files, settings)
    made_of = {"vocab_size": vocab_size, "eot": eot, "most_bytes": MOST_BYTES, "input": listing}
    made_of |= {"val_fraction": settings.val_fraction, "text_key": settings.text_key, "split_by": "text"}
    splits = None if settings.splits == "names" else settings.splits  # as in records from before
    made_of |= {"splits": splits, "max_tokens": settings.max_tokens}
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        if not job.resume:
            delete_dataset(folder)
            (folder / RECORD).unlink(missing_ok=True)
        if not _is_there(folder, made_of):
            bad: list[str] = []

            def reject(reason: str) -> None:
                bad.append(reason)
                if len(bad) > job.max_bad + BAD_LISTED:
                    raise too_many_bad(len(bad), bad, job.max_bad)

            found = training_documents(parts, with_threshold(settings, parts), reject, MOST_BYTES)
            content = _train(pieces(found, MOST_BYTES), vocab_size, eot)
            if len(bad) > job.max_bad:
                raise too_many_bad(len(bad), bad, job.max_bad)
            write_content(folder, content, EOT_ID)
            write_json(folder / RECORD, {**made_of, "sha256": file_hash(folder / FILE)})
        return FileTokenizer(folder / FILE)


def _is_there(folder: Path, made_of: dict[str, Any]) -> bool:
    """Whether the folder's tokenizer was made of this. UserError if the folder holds tokens of another one:
    nothing of them may change."""
    try:
        recorded = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    except (OSError, ValueError) as error:
        fix = "--no-resume deletes what is there"
        raise UserError(f"{folder / RECORD} is damaged ({error}); {fix}") from None
    differ = [key for key in made_of if recorded.get(key) != made_of[key]]
    if differ and ((folder / "plan.json").exists() or any(folder.glob("*.bin"))):
        raise begun_otherwise(folder, differ if recorded else ["tokenizer"])
    return not differ and (folder / FILE).is_file() and file_hash(folder / FILE) == recorded.get("sha256")


def _train(texts: Iterable[str], vocab_size: int, eot: str) -> str:
    print(f"training a tokenizer of {vocab_size:,} ids", flush=True)
    size = 0

    def counted() -> Iterator[str]:
        nonlocal size
        for text in texts:
            size += len(text.encode())
            yield text

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
    parts: list[Part], settings: Settings, reject: Callable[[str], None], most_bytes: int
) -> Iterator[Iterable[str]]:
    """The documents for training, in their order; of very much text an even part of about most_bytes. A file
    of text that is left out is not even opened. Of an only document, it is the beginning."""
    every = max(1, math.ceil(sum(part.text_size for part in parts) / most_bytes))
    is_left_out = (number % every != 0 for number in itertools.count())
    for part in parts:
        files = [file for file in part.files if not is_one_document(Path(file.path)) or not next(is_left_out)]
        for document in documents(part._replace(files=tuple(files)), settings, reject):
            unused = not is_one_document(Path(document.path)) and next(is_left_out)
            if document.split == "train" and not unused:
                yield document.content


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
