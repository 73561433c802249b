"""Decides which documents are for training and which for validation, and says what it decided.

Files of many documents may say it by their names. Otherwise the hash of a document's text decides: it is the
same on every machine, whatever other files there are, and of copies all fall into one split. The trap:
validation text that was trained on makes the validation loss too low, and no error shows it.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.pipeline.documents import is_one_document
from data.pipeline.input_files import say_files

# What a name begins with or ends in, apart from numbers; if it says two splits, the first of these counts.
WORDS = {
    "test": "tests?|testing|h[eo]ld[-_. ]?out",
    "val": "val|valid|validation|dev|development|evals?|evaluation",
    "train": "train|training",
}
LETTER = r"[^\W\d_]"
NAMES = {
    split: re.compile(rf"(?:{words})(?!{LETTER})|.*[\W\d_](?:{words})(?:of|[\W\d_])*$", re.DOTALL)
    for split, words in WORDS.items()
}
SUFFIX = re.compile(r"\.(jsonl|parquet|mds)(\.\w+)?$")


def named_split(name: str) -> str | None:
    """The split that a path says ("train", "val", "test"), the outermost folder first; None if it says
    none, as a file that is one document: notes and programs often have such names."""
    if is_one_document(Path(name)):
        return None
    *folders, file = Path(name).parts
    for part in (*folders, SUFFIX.sub("", file)):
        for split, pattern in NAMES.items():
            if pattern.match(part.lower()):
                return split
    return None


def splits_of_files(names: list[str], ignore: bool) -> list[str | None]:
    """The split of each input file; None: the hash of each document decides. "test" is not read. Raises
    UserError."""
    said = [named_split(name) for name in names]
    of_records = {s: name for s, name in zip(said, names, strict=True) if not is_one_document(Path(name))}
    # if the names of all say the same, they do not tell what to train on from what to validate on
    if ignore or len(of_records) < 2:
        return [None] * len(names)
    if None in of_records or "train" not in of_records:
        shown = "; ".join(f"{split or 'no split'}: {name}" for split, name in of_records.items())
        raise UserError(
            f"the names of the input files do not say of all which are for training ({shown}); rename them, "
            "name those that you want with --input, or pass --splits=ignore to take all as plain documents"
        )
    if "val" in of_records:
        return [split or "train" for split in said]
    return ["test" if split == "test" else None for split in said]


# --- few documents ---


def threshold(hashes: Iterable[int], val_fraction: float, can_cut: bool) -> int | None:
    """A document, or a sample of token ids, is for validation if its hash is below this: val_fraction of all
    hashes. If that would leave a split without any document, the one with the nearest hash gets into it.
    Takes hashes until there is one of each split. None: there is one document only, which can be cut. Raises
    UserError if all are the same."""
    usual = math.ceil(val_fraction * 2**64)
    least, most, count = 2**64, -1, 0
    for hashed in hashes:
        least, most, count = min(least, hashed), max(most, hashed), count + 1
        if least < usual <= most:
            return usual
    if count == 0:
        return usual
    if count == 1 and can_cut:
        print("there is one document, so its end is for validation")
        return None
    if least == most:
        raise UserError(
            f"the input holds one text only ({count:,} documents or samples), so none can be for "
            "validation. Add other text or leave the copies out of --input; --no-resume deletes what is there"
        )
    split, which = ("validation", "smallest") if least >= usual else ("training", "largest")
    print(
        f"--val_fraction={val_fraction:g} of {count:,} documents leaves none for {split}: the one "
        f"whose text has the {which} hash is taken"
    )
    return least + 1 if least >= usual else most


# --- what was decided ---


def say_splits(named: Iterable[str], manifests: list[dict], hashes: dict[str, list[Path]]) -> None:
    """Names the files for validation, and counts the documents in them that are also in training files.
    named: files whose names say so. hashes: {split: files with the hashes of documents} of named files; of
    those for training, one is in memory at a time."""
    say_files("for validation", named, "named so")
    chosen = [name for manifest in manifests for name in manifest["val_files"]]
    held_out = sum(manifest["val_documents"] for manifest in manifests)
    others = sum(manifest["documents"] for manifest in manifests) - held_out
    counts = f"{others:,} documents are for training, {held_out:,} for validation"
    say_files("for validation", chosen, f"by the hash of their text; {counts}")
    of_val = np.concatenate([np.empty(0, "<u8"), *(np.fromfile(path, "<u8") for path in hashes["val"])])
    is_twice = np.zeros(len(of_val), bool)
    for path in hashes["train"]:
        is_twice |= np.isin(of_val, np.fromfile(path, "<u8"))
    if is_twice.any():
        print(
            f"warning: {is_twice.sum():,} of {len(of_val):,} validation documents are training documents, "
            "too, so the validation loss will be too low; take them out of one kind of files"
        )
