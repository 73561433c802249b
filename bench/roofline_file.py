"""Ceilings that were measured on this machine before: bench.roofline reads one instead of measuring again.

A ceiling is that of one GPU, by its UUID, with its power limit, driver and versions, of one shape, and
measured in one way. All of these make the file's name. The folder is XDG_CACHE_HOME/nanomfu/roofline, by
default in ~/.cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import torch

from common.durable_file import write_json
from common.json_file import read_json
from training.configuration.keys import TrainConfig
from training.hardware.description import describe_hardware
from training.hardware.nvml import Nvml, Unavailable

MEASUREMENT = 3  # to be raised when bench/roofline.py measures otherwise


def read_saved(config: TrainConfig, device: torch.device) -> dict | None:
    """The result for this configuration on this machine; None if there is none, or if it is damaged. A CPU's
    is never kept: other programs use it, too."""
    if device.type == "cpu":
        return None
    try:
        saved = read_json(_path(config, device))
        return saved["result"] if isinstance(saved["result"], dict) else None
    except (OSError, ValueError, LookupError):
        return None


def save(result: dict, config: TrainConfig, device: torch.device) -> None:
    """If the folder cannot be written, the next run measures again."""
    if device.type == "cpu":
        return
    path = _path(config, device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"of": _identity(config, device), "result": result})
    except OSError as error:
        print(f"the ceiling is not saved: {path}: {error.strerror}")


def _path(config: TrainConfig, device: torch.device) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    text = json.dumps(_identity(config, device), sort_keys=True)
    return cache / "nanomfu" / "roofline" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _identity(config: TrainConfig, device: torch.device) -> dict:
    facts = describe_hardware(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        limit = Nvml([uuid]).describe()["gpus"][0]["power_limit_w"]
    except Unavailable:
        limit = None
    return {
        "measurement": MEASUREMENT,
        "uuid": uuid,
        "gpu": {name: facts[name] for name in ("gpu_name", "driver", "cuda", "cudnn", "torch")},
        "power_limit_w": limit,
        "model": dataclasses.asdict(config.model_config()),
        "keys": {
            name: getattr(config, name)
            for name in (
                *("batch_size", "block_size", "dtype", "attention_backend", "low_precision"),
                *("low_precision_scope", "peak_tflops", "use_sparse_specs"),
            )
        },
    }
