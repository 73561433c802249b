"""Reads state.json, all of a checkpoint that is not a tensor. Every reader of checkpoints uses read_state(),
and a field of the wrong type or out of its range makes the checkpoint a damaged one.

The hash of state.json in the manifest proves nothing of this kind: whoever can write one can write both.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args, get_type_hints

from common.errors import UserError
from common.json_file import read_json
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
MAX_COUNT = 1 << 53  # of iterations or samples; JSON keeps whole numbers exactly up to here
PLAIN = str, int, float, bool, type(None)  # types of values that can be compared and shown
STEP = re.compile(r"step-([0-9]{1,16})")  # the name of a checkpoint's folder


class UnknownFormat(UserError):
    """Another version of nanoMFU wrote the checkpoint. It is not damaged."""


@dataclass(frozen=True, kw_only=True)
class SavedState(Progress):
    """What a checkpoint says of the run that saved it, besides where that stood."""

    format: int  # of the checkpoint
    world_size: int
    config: dict[str, Any]  # settings: numbers, text, booleans, null, and rope_scaling's object of them
    model_config: ModelConfig
    data: dict[str, Any]  # fingerprint
    run: str  # name of the run's record
    token: str | None = None  # of the run (training/checkpoints/resume.py); earlier versions stored none
    pretrained: dict[str, Any] | None = None  # the weights that the run began with: source, commit, files
    # weights and what the optimizer keeps: name -> dtype and shape
    tensors: dict[str, str] = field(default_factory=dict)


def step_number(folder: Path) -> int | None:
    """The iteration in the name of a checkpoint's folder; None if it is no such name."""
    match = STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def file_of(folder: Path, name: str) -> Path:
    """The path of a checkpoint's file, for whoever reads it. Raises ValueError if it leads elsewhere: if the
    file or the folder is a link (docs/security.md)."""
    for path in (folder, folder / name):
        if path.is_symlink():
            raise ValueError(f"{path.name} is a link, which is not followed; put a copy in its place")
    return folder / name


def read_state(folder: Path) -> SavedState:
    """Raises UnknownFormat, or ValueError if state.json is missing or not what a run writes."""
    try:
        content = read_json(file_of(folder, STATE), MAX_BYTES)
        return _parse(content, folder)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(f"{STATE} cannot be read ({error})") from None


# --- its fields. tuple: types · int: a whole number from it · dict: an object · Each: one of such fields ---


class Each(NamedTuple):
    kind: Any


class Optional(NamedTuple):
    """A field that may be missing."""

    kind: Any


LOSS = (int, float, type(None))
LARGEST = sys.float_info.max  # a JSON file may have NaN, and larger whole numbers
TEXT = (str, type(None))
SOURCE = {  # as training/batches/fingerprint.py makes it
    "tokenizer": {"name": TEXT, "sha256": TEXT},
    **dict.fromkeys(("dtype", "vocab_size", "eot_id", "weight"), Optional(PLAIN)),
    "splits": Each(Each(dict.fromkeys(("tokens", "sha256", "probe"), PLAIN))),
    "packings": Optional(Each((str,))),
}
WEIGHTS = {  # as training/pretrained/folder.py describes them; older checkpoints lack `generation`
    "source": (str,),
    "commit": Optional(TEXT),
    "files": Each({"sha256": (str,)}),
    "config": {},  # still to be checked
    "generation": Optional({}),
}
FIELDS = {
    "iteration": 0,
    "samples_seen": 0,
    "best_val_loss": LOSS,
    "val_loss": LOSS,
    "world_size": 1,
    "config": {"batch_size": 1, "gradient_accumulation_steps": 1, "dataset": (str,)},
    "data": {"sha256": (str,)},
    "run": (str,),
    "token": Optional(TEXT),
    "measure": Optional(TEXT),
    "measured_since": Optional(0),
    "tensors": Optional(Each((str,))),
}


def _parse(content: dict[str, Any], folder: Path) -> SavedState:
    _check("format", content.get("format"), 1)
    if content["format"] not in FORMATS:
        known = ", ".join(map(str, FORMATS))
        raise UnknownFormat(
            f"{folder} has checkpoint format {content['format']}; this version of nanoMFU reads {known}"
        )
    model_config = _settings(content, "model_config")
    content["config"] = todays_settings(_settings(content, "config"))
    _check_fields("", content, FIELDS)
    if content["iteration"] != step_number(folder):
        raise ValueError(f"iteration={content['iteration']} is not that of {folder.name}")
    data = content["data"]
    sources = data.get("sources", [data])
    _check("data.sources", sources, (list,))
    for number, source in enumerate(sources):
        _check(f"data.sources[{number}]" if "sources" in data else "data", source, SOURCE)
    if content.get("pretrained") is not None:
        _check("pretrained", content["pretrained"], WEIGHTS)
    values = {one.name: content[one.name] for one in fields(SavedState) if one.name in content}
    return SavedState(**{**values, "model_config": _model_config(model_config)})


def _settings(content: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of plain values, which can be compared and shown; rope_scaling is itself such an object."""
    settings: Any = content.get(name)
    _check(name, settings, {})
    for key, value in settings.items():
        is_object = key == "rope_scaling" and isinstance(value, dict)
        _check(f"{name}.{key}", value, Each(PLAIN) if is_object else PLAIN)
    return settings


def _check(name: str, value: object, kind: Any) -> None:
    """Raises ValueError unless the value is of this kind. A bool is no number here."""
    if isinstance(kind, (Each, dict)):
        _check_types(name, value, dict)
        found = cast("dict", value)
        _check_fields(f"{name}.", found, kind if isinstance(kind, dict) else dict.fromkeys(found, kind.kind))
    elif isinstance(kind, int):
        _check_types(name, value, int)
        if not kind <= cast("int", value) < MAX_COUNT:
            raise ValueError(f"{name}={_shown(value)} is not from {kind} to 2^53")
    else:
        _check_types(name, value, *kind)
        if kind == LOSS and value is not None and not -LARGEST <= cast("float", value) <= LARGEST:
            raise ValueError(f"{name}={_shown(value)} is not a finite number")


def _check_fields(prefix: str, found: dict[str, Any], kinds: dict[str, Any]) -> None:
    for name, kind in kinds.items():
        if name in found:
            _check(prefix + name, found[name], kind.kind if isinstance(kind, Optional) else kind)
        elif not isinstance(kind, Optional):
            raise ValueError(f"{prefix}{name} is missing")


def _check_types(name: str, value: object, *types: type) -> None:
    if type(value) not in types:
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        raise ValueError(f"{name} is {_shown(value)}, not {expected}")


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__}"
    return "null" if value is None else repr(value)[:40]


def _model_config(saved: dict[str, Any]) -> ModelConfig:
    """A field that is missing is newer than the checkpoint and has its default."""
    hints = get_type_hints(ModelConfig)
    for name, value in saved.items():
        if name not in hints:
            raise ValueError(f"model_config.{name} is unknown")
        if name == "rope_scaling":  # ModelConfig reads and checks it
            continue
        types = {*(get_args(hints[name]) or (hints[name],)), type(getattr(ModelConfig, name))}
        _check_types(f"model_config.{name}", value, *types, *((int,) if float in types else ()))
        if type(value) in (int, float) and not -MAX_COUNT < value < MAX_COUNT:  # also catches NaN
            raise ValueError(f"model_config.{name}={_shown(value)} is no size")
    return ModelConfig(**saved)  # raises ValueError
