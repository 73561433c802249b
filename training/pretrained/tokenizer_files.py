"""Finds the tokenizer that belongs to a checkpoint: that of the weights which the run began with, copied as
it is, or that of the run's dataset."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.pipeline.dataset_tokenizer import load_tokenizer, names_tokenizer
from data.pipeline.meta_file import read_meta
from data.tokenizers.files_beside import BESIDE
from data.tokenizers.to_file import write_tokenizer
from data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from training.batches.sources import tokenizer_identity
from training.checkpoints.saved_state import SavedState
from training.configuration.dataset_name import first_folder
from training.pretrained.folder import recall
from training.pretrained.same_tokenizer import (
    check_recorded,
    is_tokenizer_of,
    tokenizer_hash,
)
from training.pretrained.tokenizer_hash import VOCABULARIES

COPIED = (*VOCABULARIES, "merges.txt", *BESIDE)


@dataclass(frozen=True)
class TokenizerFiles:
    description: str
    eot_id: int | None  # of the token that ends a document of the dataset
    source: Path = Path()
    copied: tuple[Path, ...] = ()  # below it
    made: Any = None  # a Tokenizer whose files are made

    def write(self, folder: Path) -> None:
        for path in self.copied:
            target = folder / path.relative_to(self.source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        if self.made is not None:
            write_tokenizer(folder, self.made, self.eot_id)


def find_tokenizer(saved: SavedState, checkpoint: Path, dataset: str | None) -> TokenizerFiles:
    """`dataset`: where the run's dataset is, if it has moved. Without any tokenizer, nothing is written.
    Raises UserError if the dataset has another tokenizer than the run was trained with."""
    data = saved.data.get("sources", [saved.data])[0]
    trained, eot_id = data.get("tokenizer") or tokenizer_identity({}), data.get("eot_id")
    began, copied = saved.pretrained, None
    weights = recall(began["source"], began["commit"]) if began else None
    theirs, files = _open(weights.folder) if weights else (None, ())
    if weights and theirs:
        copied = TokenizerFiles(f"copied from {weights.source}", eot_id, weights.folder, files)
        if trained["sha256"] == tokenizer_hash(theirs):
            return copied
    folder = first_folder(dataset or saved.config["dataset"])
    if dataset is None and not (folder / "meta.json").exists():
        if copied and trained["sha256"] is None:  # nothing more can be known
            return copied
        return TokenizerFiles(f"none was found: {folder} is gone; name the dataset with --dataset", eot_id)
    recorded = read_meta(folder)["tokenizer"]
    found, fix = tokenizer_identity(recorded or {}), "name the run's dataset with --dataset"
    check_recorded(trained, str(checkpoint), found, str(folder), fix)
    if not names_tokenizer(recorded):
        return copied or TokenizerFiles(f"none was found: {folder} names none; copy its files there", eot_id)
    ours = load_tokenizer(folder)
    if copied and theirs and theirs.vocab_size == ours.vocab_size and is_tokenizer_of(theirs, folder):
        return copied
    return TokenizerFiles(f"that of the dataset {folder}", eot_id, made=ours)


def _open(folder: Path) -> tuple[Tokenizer | None, tuple[Path, ...]]:
    """The tokenizer in a folder of weights, and its files; None if there is none that can be read."""
    files = tuple(path for name in COPIED for path in sorted(folder.glob(name)) if path.is_file())
    try:
        return open_tokenizer(str(folder)), files
    except UserError:
        return None, ()
