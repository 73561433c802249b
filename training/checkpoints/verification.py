"""Decides whether a checkpoint can be trusted: its files are what was written, state.json is what a run
writes, and the tensors are those of its model. Every reader of checkpoints uses this one notion of damage.
"""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import model_builder
from common.errors import UserError
from common.json_file import read_json
from model_config import ModelConfig
from ops.quantization.adamw_8bit import is_quantized, scales_shape
from training.checkpoints.folder import MANIFEST, complete_checkpoints
from training.checkpoints.saved_state import (
    HALVES_FORMAT,
    STATE,
    SavedState,
    UnknownFormat,
    file_of,
    read_state,
)
from training.checkpoints.tensor_files import SUFFIX, Part, Place, read_header
from training.checkpoints.tensor_reader import TensorFiles
from training.checkpoints.train_state import MOMENTUM, SCALES
from training.process.agreement import from_main
from training.process.world import ALONE, World, gather_objects

HASH_THREADS = 4  # files hashed in parallel
HASH_CHUNK = 1 << 22  # bytes
MOST_NAMED = 10  # problems
MAX_MANIFEST = 64 << 20  # bytes; it has about 150 for each file
NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")  # of a file in a checkpoint
SHA256 = re.compile(r"[0-9a-f]{64}")


def damage(folder: Path, world: World = ALONE) -> list[str]:
    """The problems of a checkpoint; none if it can be trusted. All ranks of `world`."""
    shares = gather_objects(_file_problems(folder, world.rank, world.size), world)
    problems = list(dict.fromkeys(problem for share in shares for problem in share))
    return problems or from_main(world, _content_problems, folder)


def damaged(folder: Path, problems: list[str]) -> UserError:
    if not (folder / MANIFEST).is_file():
        return UserError(
            f"the checkpoint {folder} was deleted while it was read: start again, or raise keep_last of the "
            "run that saves there"
        )
    others = [p.name for p in complete_checkpoints(folder.parent) if p != folder]
    older = f"others are {', '.join(others[-3:])}" if others else "there is no other one"
    return UserError(f"the checkpoint {folder} is damaged: {'; '.join(problems)}; {older}")


# --- the files ---


def _file_problems(folder: Path, share: int, shares: int) -> list[str]:
    """Compares every file of this share with the manifest. Names the first problems."""
    try:
        files = sorted(recorded_files(folder).items())[share::shares]
        there = set(os.listdir(folder))
    except (OSError, ValueError) as error:
        return [str(error)]
    problems = [f"{name} is missing" for name, _ in files if name not in there]
    if not problems:  # otherwise nothing needs to be read
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            problems = list(filter(None, pool.map(lambda item: _problem(folder, *item), files)))
    more = [f"and {len(problems) - MOST_NAMED:,} more"] if len(problems) > MOST_NAMED else []
    return problems[:MOST_NAMED] + more


def recorded_files(folder: Path) -> dict[str, dict[str, Any]]:
    """{name: {sha256, bytes}} from the manifest. Raises ValueError if it is not a valid manifest."""
    try:
        files = read_json(file_of(folder, MANIFEST), MAX_MANIFEST).get("files")
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from None
    if not isinstance(files, dict) or STATE not in files or not all(map(_is_recorded, files.items())):
        raise ValueError(f"{MANIFEST} does not list a checkpoint's files")
    return files


def _is_recorded(item: tuple[str, Any]) -> bool:
    name, recorded = item
    is_name = NAME.fullmatch(name) and name not in (".", "..", MANIFEST)
    if not is_name or not isinstance(recorded, dict):
        return False
    sha256, size = recorded.get("sha256"), recorded.get("bytes")
    return isinstance(sha256, str) and bool(SHA256.fullmatch(sha256)) and type(size) is int and size >= 0


def _problem(folder: Path, name: str, recorded: dict[str, Any]) -> str | None:
    try:
        path = file_of(folder, name)
        if not path.is_file():  # a named pipe, for example, which nobody may open
            return f"{name} is missing"
        if path.stat().st_size != recorded["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes, recorded {recorded['bytes']:,}"
        matches = digest(path)["sha256"] == recorded["sha256"]
        return None if matches else f"{name} does not match its sha256"
    except (OSError, ValueError) as error:  # a bad sector, for example
        return f"{name} cannot be read ({error})"


def digest(path: Path) -> dict[str, Any]:
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK):
            sha256.update(chunk)
    return {"sha256": sha256.hexdigest(), "bytes": path.stat().st_size}


# --- what is in them ---


def _content_problems(folder: Path) -> list[str]:
    """Checks a checkpoint whose files match. One of an unknown format counts as whole: reading it tells the
    user which version it needs."""
    try:
        state = read_state(folder)
        _check_tensors(open_tensors(folder, state).wholes, state.model_config)
    except UnknownFormat:
        return []
    except (ValueError, OSError) as error:
        return [str(error)]
    return []


def read_parts(folder: Path, share: int = 0, shares: int = 1) -> list[tuple[Part, Place]]:
    """What is where in this share of the folder's files of tensors: of those that the manifest lists. Raises
    ValueError or OSError."""
    names = sorted(name for name in recorded_files(folder) if name.endswith(SUFFIX))[share::shares]
    return [item for name in names for item in read_header(file_of(folder, name)).items()]


def open_tensors(
    folder: Path, saved: SavedState, parts: list[tuple[Part, Place]] | None = None
) -> TensorFiles:
    """A reader of the folder's tensors, with their rows in the order of FORMAT. parts: those of all files, if
    they have been read. Raises ValueError or OSError."""
    parts = read_parts(folder) if parts is None else parts
    if saved.format != HALVES_FORMAT or saved.model_config.ffn_type != "swiglu":
        return TensorFiles(parts)
    names = {part.name for part, _ in parts}  # of weights, biases and their moments
    return TensorFiles(parts, {n for n in names if ".ffn.up." in n and not n.endswith(".step")})


def _check_tensors(saved: dict[str, Part], config: ModelConfig) -> None:
    """Raises ValueError unless every weight is there with its moments, in its shape, as floating point or as
    bytes with their scales."""
    try:
        model = model_builder.build_model(config)  # on the meta device: only the shapes
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"its model cannot be built ({error})") from None
    for name, weight in model.named_parameters():
        _check_tensor(f"model.{name}", saved, weight.shape)
        if not weight.requires_grad:  # frozen
            continue
        _check_tensor(f"optimizer.{name}.step", saved, torch.Size())
        if f"optimizer.{name}.{MOMENTUM}" in saved:
            _check_tensor(f"optimizer.{name}.{MOMENTUM}", saved, weight.shape)
            continue
        for moment, scale in SCALES.items():
            moment, scale = f"optimizer.{name}.{moment}", f"optimizer.{name}.{scale}"
            has_8_bits = is_quantized(weight.shape) and scale in saved
            _check_tensor(moment, saved, weight.shape, torch.uint8 if has_8_bits else None)
            if has_8_bits:
                _check_tensor(scale, saved, scales_shape(weight.shape))


def _check_tensor(
    name: str, saved: dict[str, Part], shape: torch.Size, dtype: torch.dtype | None = None
) -> None:
    """dtype: None is any floating point."""
    found = saved.get(name)
    if found is None:
        raise ValueError(f"the tensor {name} is missing")
    if found.shape != shape or not (found.dtype == dtype if dtype else found.dtype.is_floating_point):
        wanted = dtype or "of floating point and"
        raise ValueError(f"the tensor {name} is {found.dtype} {found.shape}, not {wanted} {tuple(shape)}")
