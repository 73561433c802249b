"""Reads state.json, all of a checkpoint that is not a tensor. Every reader of checkpoints uses read_state(),
and a field of the wrong type or out of its range makes the checkpoint a damaged one.

The hash of state.json in the manifest proves nothing of this kind: whoever can write one can write both.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from common.errors import UserError
from common.json_file import read_json
from model_config import ModelConfig
from training.configuration.other_names import todays_settings

FORMAT = 3
HALVES_FORMAT = 2  # the same, but ffn.up of a gated model has all rows of gate, then all rows of up
FORMATS = (HALVES_FORMAT, FORMAT)
STATE = "state.json"
MAX_BYTES = 64 << 20  # it lists the files of every dataset
MAX_COUNT = 1 << 53  # of iterations or samples; JSON keeps whole numbers exactly up to here
PLAIN = str, int, float, bool, type(None)  # types of values that can be compared and shown
STEP = re.compile(r"step-([0-9]{1,16})")  # the name of a checkpoint's folder


class UnknownFormat(UserError):
    """Another version of nanoMFU wrote the checkpoint. It is not damaged."""


@dataclass(frozen=True)
class SavedState:
    """What a checkpoint says of the run that saved it."""

    format: int  # of the checkpoint
    iteration: int  # optimizer updates done
    samples_seen: int  # sequences, over all GPUs
    best_val_loss: float | None
    val_loss: float | None
    world_size: int
    config: dict[str, Any]  # settings: numbers, text, booleans, null, and rope_scaling's object of them
    model_config: ModelConfig
    data: dict[str, Any]  # fingerprint
    run: str  # name of the run's record
    measure: str | None = None  # of its validation losses; None of earlier versions
    measured_since: int = 0  # the iteration from which on losses were of this measure
    pretrained: dict[str, Any] | None = None  # the weights that the run began with: source, commit, files


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


def _parse(content: dict[str, Any], folder: Path) -> SavedState:
    version = _whole(content, "format", 1)
    if version not in FORMATS:
        known = " and ".join(map(str, FORMATS))
        raise UnknownFormat(
            f"{folder} has checkpoint format {version}; this version of nanoMFU reads {known}"
        )
    iteration = _whole(content, "iteration", 0)
    if iteration != step_number(folder):
        raise ValueError(f"iteration={iteration} is not that of {folder.name}")
    config = todays_settings(_settings(content, "config"))
    for name in ("batch_size", "gradient_accumulation_steps"):
        _whole(config, name, 1)
    _check("dataset", config.get("dataset"), str)
    data = _object("data", content.get("data"))
    _check_fingerprint(data)
    run: Any = content.get("run")
    _check("run", run, str)
    measure: Any = content.get("measure")
    _check("measure", measure, str, type(None))
    return SavedState(
        format=version,
        iteration=iteration,
        samples_seen=_whole(content, "samples_seen", 0),
        best_val_loss=_loss(content, "best_val_loss"),
        val_loss=_loss(content, "val_loss"),
        world_size=_whole(content, "world_size", 1),
        config=config,
        model_config=_model_config(_settings(content, "model_config")),
        data=data,
        run=run,
        measure=measure,
        measured_since=_whole({"measured_since": 0, **content}, "measured_since", 0),
        pretrained=_pretrained(content.get("pretrained")),
    )


def _check(name: str, value: object, *types: type) -> None:
    """Raises ValueError if the value has none of these types. A bool is not an int here."""
    if type(value) not in types:
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        raise ValueError(f"{name} is {_shown(value)}, not {expected}")


def _shown(value: object) -> str:
    if isinstance(value, (dict, list)):
        return f"a {type(value).__name__}"
    return "null" if value is None else repr(value)[:40]


def _whole(content: dict[str, Any], name: str, least: int) -> int:
    value: Any = content.get(name)
    _check(name, value, int)
    if not least <= value < MAX_COUNT:
        raise ValueError(f"{name}={_shown(value)} is not from {least} to 2^53")
    return value


def _loss(content: dict[str, Any], name: str) -> float | None:
    if name not in content:
        raise ValueError(f"{name} is missing")
    value = content[name]
    _check(name, value, int, float, type(None))
    return None if value is None else _finite(name, value)


def _finite(name: str, value: int | float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={_shown(value)} is not a finite number")
    return number


def _settings(content: dict[str, Any], name: str) -> dict[str, Any]:
    """An object of plain values, which can be compared and shown; rope_scaling is itself such an object."""
    settings = _object(name, content.get(name))
    for key, value in settings.items():
        fields = value if key == "rope_scaling" and isinstance(value, dict) else {key: value}
        for field, plain in fields.items():
            _check(f"{name}.{key}" if field == key else f"{name}.{key}.{field}", plain, *PLAIN)
    return settings


def _model_config(saved: dict[str, Any]) -> ModelConfig:
    """A field that is missing is newer than the checkpoint and has its default."""
    hints = get_type_hints(ModelConfig)
    for name, value in saved.items():
        if name not in hints:
            raise ValueError(f"model_config.{name} is unknown")
        if name == "rope_scaling":  # ModelConfig reads and checks it
            continue
        types = {*(get_args(hints[name]) or (hints[name],)), type(getattr(ModelConfig, name))}
        _check(f"model_config.{name}", value, *types, *((int,) if float in types else ()))
        if type(value) in (int, float) and not -MAX_COUNT < value < MAX_COUNT:  # also catches NaN
            raise ValueError(f"model_config.{name}={_shown(value)} is no size")
    return ModelConfig(**saved)  # raises ValueError


def _pretrained(value: object) -> dict[str, Any] | None:
    """As training/pretrained/folder.py describes weights; `config` is a config.json, still to be checked, and
    `generation` a generation_config.json, which older checkpoints lack."""
    if value is None:
        return None
    found = _object("pretrained", value)
    _check("pretrained.source", found.get("source"), str)
    _check("pretrained.commit", found.get("commit"), str, type(None))
    for file, facts in _object("pretrained.files", found.get("files")).items():
        _check(f"pretrained.files.{file}", _object(file, facts).get("sha256"), str)
    _object("pretrained.config", found.get("config"))
    _object("pretrained.generation", found.get("generation", {}))
    return found


# --- the data's fingerprint, as training/batches/fingerprint.py makes it ---

FACTS = ("dtype", "vocab_size", "eot_id", "weight")


def _check_fingerprint(fingerprint: dict[str, Any]) -> None:
    """Checks what a comparison with today's data uses."""
    _check("data.sha256", fingerprint.get("sha256"), str)
    sources = fingerprint.get("sources", [fingerprint])
    _check("data.sources", sources, list)
    for number, source in enumerate(sources):
        name = f"data.sources[{number}]"
        _check_source(name if "sources" in fingerprint else "data", _object(name, source))


def _check_source(name: str, source: dict[str, Any]) -> None:
    tokenizer = _object(f"{name}.tokenizer", source.get("tokenizer"))
    for key in ("name", "sha256"):
        _check(f"{name}.tokenizer.{key}", tokenizer.get(key, []), str, type(None))
    for key in FACTS:
        _check(f"{name}.{key}", source.get(key), *PLAIN)
    for split, files in _object(f"{name}.splits", source.get("splits")).items():
        for file, facts in _object(f"{name}.splits.{split}", files).items():
            where = f"{name}.splits.{split}.{file}"
            facts = _object(where, facts)
            for key in ("tokens", "sha256", "probe"):
                _check(f"{where}.{key}", facts.get(key, []), *PLAIN)
    for file, sha256 in _object(f"{name}.packings", source.get("packings", {})).items():
        _check(f"{name}.packings.{file}", sha256, str)


def _object(name: str, value: object) -> dict[str, Any]:
    _check(name, value, dict)
    assert isinstance(value, dict)
    return value
