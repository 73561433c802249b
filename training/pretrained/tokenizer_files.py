"""Finds the tokenizer that belongs to a checkpoint: that of the weights which the run began with, copied as
it is, or that of the run's dataset."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.pipeline.meta_file import load_tokenizer, read_meta
from data.tokenizers.to_file import write_tokenizer
from data.tokenizers.tokenizer import Tokenizer, hash_tokenizer, open_tokenizer
from training.checkpoints.saved_state import SavedState
from training.configuration.dataset_name import dataset_folder, parse_dataset
from training.configuration.keys import TrainConfig
from training.pretrained.folder import recall

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a tokenizer
COPIED = (
    *VOCABULARIES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class TokenizerFiles:
    description: str
    eot_id: int | None  # of the token that ends a document of the dataset
    copied: tuple[Path, ...] = ()
    made: Any = None  # a Tokenizer whose files are made

    def write(self, folder: Path) -> None:
        for path in self.copied:
            shutil.copyfile(path, folder / path.name)
        if self.made is not None:
            write_tokenizer(folder, self.made, self.eot_id)


def find_tokenizer(saved: SavedState, dataset: str | None) -> TokenizerFiles:
    """`dataset`: where the run's dataset is, if it has moved. Without any tokenizer, nothing is written."""
    eot_id = saved.data.get("sources", [saved.data])[0].get("eot_id")
    folder = _dataset_folder(dataset or saved.config["dataset"])
    recorded, tokenizer = _of_dataset(folder)
    began = saved.pretrained
    weights = recall(began["source"], began["commit"]) if began else None
    if weights is not None and (files := _files(weights.folder)):
        if recorded is None or recorded == _hash(weights.folder):
            return TokenizerFiles(f"copied from {weights.source}", eot_id, files)
    if tokenizer is not None:
        return TokenizerFiles(f"that of the dataset {folder}", eot_id, made=tokenizer)
    return TokenizerFiles(f"none was found: {folder} names none; copy its files there", eot_id)


def _dataset_folder(dataset: str) -> Path:
    first = next(iter(parse_dataset(dataset)))  # a mixture has one tokenizer
    return dataset_folder(TrainConfig(dataset=first))


def _of_dataset(folder: Path) -> tuple[str | None, Tokenizer | None]:
    """(the hash that meta.json records, the tokenizer); None for what is not there."""
    try:
        recorded = (read_meta(folder)["tokenizer"] or {}).get("sha256")
        return recorded, load_tokenizer(folder)
    except (UserError, OSError):
        return None, None


def _files(folder: Path) -> tuple[Path, ...]:
    found = tuple(folder / name for name in COPIED if (folder / name).is_file())
    return found if any(path.name in VOCABULARIES for path in found) else ()


def _hash(folder: Path) -> str | None:
    try:
        return hash_tokenizer(open_tokenizer(str(folder)))
    except UserError:
        return None
