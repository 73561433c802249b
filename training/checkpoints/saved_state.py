"""Reads state.json, all of a checkpoint that is not a tensor. Every reader of checkpoints uses read_state(),
and a field of the wrong type or out of its range makes the checkpoint a damaged one.

The hash of state.json in the manifest proves nothing of this kind: whoever can write one can write both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_json
from common.schema import Plain, Positive, naming, parse
from model_config import ModelConfig
from training.checkpoints.train_state import Progress
from training.configuration.other_names import todays_settings

FORMAT = 5
# 2, 3 and 4 list no tensors: verification.py knows what they must have. In 2, ffn.up of a gated model has all
# rows of gate, then all rows of up
HALVES_FORMAT = 2
FORMATS = (HALVES_FORMAT, 3, 4, FORMAT)
STATE = "state.json"
MAX_BYTES = 64 << 20  # it lists the files of every dataset
STEP = re.compile(r"step-([0-9]{1,16})")  # the name of a checkpoint's folder


class UnknownFormat(UserError):
    """Another version of nanoMFU wrote the checkpoint. It is not damaged."""


@dataclass(frozen=True, kw_only=True)
class SavedState(Progress):
    """What a checkpoint says of the run that saved it, besides where that stood."""

    best_val_loss: float | None = field()  # every version has saved these two
    val_loss: float | None = field()
    format: Positive  # of the checkpoint
    world_size: Positive
    config: dict[str, Any]  # settings: numbers, text, booleans, null, and rope_scaling's object of them
    model_config: ModelConfig
    data: dict[str, Any]  # fingerprint
    run: str  # name of the run's record
    token: str | None = None  # of the run (training/checkpoints/resume.py); earlier versions stored none
    pretrained: dict[str, Any] | None = None  # the weights that the run began with: source, commit, files
    # weights and what the optimizer keeps: name -> dtype and shape
    tensors: dict[str, str] = field(default_factory=dict)


# --- what is checked of the objects in it, which stay as they are in the file ---


@dataclass
class _Settings:
    batch_size: Positive
    gradient_accumulation_steps: Positive
    dataset: str


@dataclass
class _Tokenizer:
    name: str | None
    sha256: str | None


@dataclass
class _TokenFile:
    tokens: Plain
    sha256: Plain
    probe: Plain


@dataclass
class _Source:
    """As training/batches/fingerprint.py makes it."""

    tokenizer: _Tokenizer
    splits: dict[str, dict[str, _TokenFile]]
    packings: dict[str, str] = field(default_factory=dict)
    dtype: Plain = None
    vocab_size: Plain = None
    eot_id: Plain = None
    weight: Plain = None


@dataclass
class _Data:
    sha256: str


@dataclass
class _Pretrained:
    """As training/pretrained/folder.py describes weights; what their config.json says is checked there."""

    source: str
    files: dict[str, _Data]
    config: dict[str, Any]
    commit: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)  # older checkpoints lack it


# --- reading ---


def step_number(folder: Path) -> int | None:
    """The iteration in the name of a checkpoint's folder; None if it is no such name."""
    match = STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def file_of(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file, for whoever reads it. Raises UserError if it leads elsewhere: if the
    file or the folder is a link (docs/security.md)."""
    for path in (folder, folder / name):
        if path.is_symlink():
            raise UserError(f"{path} is a link, which is not followed; put a copy in its place")
    return folder / name


def read_state(folder: Path) -> SavedState:
    """Raises UnknownFormat, or UserError if state.json is missing or not what a run writes."""
    path = file_of(folder, STATE)
    with naming(path):
        content = read_json(path, MAX_BYTES)
        version = parse(Positive, content.get("format"), "format")
        if version not in FORMATS:
            known = ", ".join(map(str, FORMATS))
            raise UnknownFormat(
                f"{folder} has checkpoint format {version}; this version of nanoMFU reads {known}"
            )
        content["config"] = todays_settings(_settings(content, "config"))
        content["model_config"] = read_model_config(_settings(content, "model_config"))
        saved = parse(SavedState, content)
        if saved.iteration != step_number(folder):
            raise ValueError(f"iteration is {saved.iteration}, not that of {folder.name}")
        parse(_Settings, saved.config, "config")
        parse(_Data, saved.data, "data")
        is_mixture = "sources" in saved.data
        parse(list[_Source], saved.data["sources"] if is_mixture else [saved.data], "data.sources")
        parse(_Pretrained | None, saved.pretrained, "pretrained")
        return saved


def _settings(content: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of plain values, which can be compared and shown; rope_scaling is itself such an object."""
    settings = parse(dict[str, Any], content.get(name), name)
    parse(Plain | dict[str, Plain], settings.get("rope_scaling"), f"{name}.rope_scaling")
    parse(dict[str, Plain], {**settings, "rope_scaling": None}, name)
    return settings


def read_model_config(saved: dict[str, Any]) -> ModelConfig:
    """A field that is missing is newer than the checkpoint and has its default. Raises ValueError."""
    if unknown := saved.keys() - {one.name for one in fields(ModelConfig)}:
        raise ValueError(f"model_config.{min(unknown)} is unknown")
    sizes = parse(ModelConfig, {**saved, "rope_scaling": None}, "model_config")
    return replace(sizes, rope_scaling=saved.get("rope_scaling"))  # which ModelConfig reads and checks
