"""Completes the settings of a run that begins with weights of Hugging Face: the model's keys come from their
config.json. A run that resumes takes them from its checkpoint, so it needs the weights no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rope_scaling
from common.errors import UserError
from common.text import shown
from model_config import config_key
from training.checkpoints.folder import complete_checkpoints, find_checkpoint
from training.checkpoints.saved_state import read_state
from training.configuration.files_and_flags import Settings, make_config, read_settings
from training.configuration.keys import KEYS, TrainConfig
from training.pretrained.architecture import FAMILIES, Architecture
from training.pretrained.folder import CONFIG, locate


def load_run_config(argv: list[str], world_size: int = 1, needs_dataset: bool = False) -> TrainConfig:
    """load_config() of a run, which may have init_weights and may have to state dataset. Raises UserError."""
    settings = read_settings(argv)
    values = settings.values
    if needs_dataset and "dataset" not in values and not values.get("dry_run"):
        raise UserError(
            "no dataset is stated; add --dataset=NAME, of a folder in data/ (docs/data.md), or "
            "--dataset=quickstart, which is the text of Python's own library"
        )
    if values.get("init_weights") is not None:
        keys = _saved_keys(values)
        if keys is None:
            weights = locate(values["init_weights"])
            keys = _keys_of(weights.architecture(), str(weights.folder / CONFIG), settings)
        values = keys | {name: value for name, value in values.items() if value is not None}
    return make_config(settings._replace(values=values), world_size)


def _saved_keys(values: dict[str, Any]) -> dict[str, Any] | None:
    """The model's keys in the newest checkpoint that can be read; None if the run begins anew."""
    init_from, out_dir = (values.get(name, KEYS[name].default) for name in ("init_from", "out_dir"))
    if init_from not in ("resume", "auto"):
        return None
    if init_from == "resume":
        find_checkpoint(Path(out_dir), values.get("resume_from", "latest"))  # raises UserError
    for folder in reversed(complete_checkpoints(Path(out_dir) / "checkpoints")):
        try:
            saved = read_state(folder)
        except ValueError:  # damaged: the resume reports it
            continue
        model = saved.model_config.to_dict()
        preset = model.pop("arch")
        model.pop("dropout")  # no part of the weights
        keys = {"arch_preset": preset} | {config_key(name): value for name, value in model.items()}
        return {name: keys[name] for name in keys if saved.config.get(name) is not None}  # else: the preset's
    return None


def _keys_of(architecture: Architecture, where: str, settings: Settings) -> dict[str, Any]:
    """The model's keys that config.json gives. Raises UserError if the user states another value."""
    for name, value in architecture.keys.items():
        stated = settings.values.get(name)
        if stated is None or _agree(name, stated, value, architecture):
            continue
        raise UserError(
            f"{name}={shown(stated)} in {settings.places[name]} contradicts {where}, which says "
            f"{name}={shown(value)}; leave {name} out: the weights decide the architecture"
        )
    keys = dict(architecture.keys)
    block_size = settings.values.get("block_size")
    if block_size is None and keys["position_encoding"] == "learned":
        return keys | {"block_size": architecture.longest}
    block_size = block_size or TrainConfig.block_size
    if block_size > architecture.longest:
        place = settings.places.get("block_size", "its default")
        raise UserError(
            f"block_size={block_size} in {place} is longer than the {architecture.longest:,} positions that "
            f"{where} says; set --block_size={architecture.longest} or less"
        )
    return keys


def _agree(name: str, stated: Any, value: Any, architecture: Architecture) -> bool:
    if name == "arch_preset":  # only a label, once all keys are stated
        return stated in FAMILIES[architecture.family].presets
    if name == "rope_scaling":
        try:
            return rope_scaling.parse(stated).to_dict() == value
        except ValueError as error:
            raise UserError(str(error)) from None
    return bool(stated == value)
