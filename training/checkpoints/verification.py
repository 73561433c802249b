"""Decides whether a checkpoint can be trusted: its files are what was written, state.json is what a run
writes, and the tensors are those of its model. Every reader of checkpoints uses this one notion of damage.
"""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.nn as nn

import model_builder
from common.errors import UserError
from common.schema import Check, Count, Sha256, read
from common.text import shown
from training.checkpoints.folder import MANIFEST, complete_checkpoints
from training.checkpoints.saved_state import (
    FORMAT,
    HALVES_FORMAT,
    STATE,
    SavedState,
    UnknownFormat,
    file_of,
    read_state,
)
from training.checkpoints.tensor_files import SUFFIX, Part, Place, read_header
from training.checkpoints.tensor_reader import TensorFiles
from training.checkpoints.train_state import WEIGHT, described, kept_name
from training.configuration.choices import CHOICES
from training.configuration.keys import KEYS, TrainConfig
from training.optimization.optimizer import optimizer_class
from training.process.agreement import from_main
from training.process.world import ALONE, World, gather_objects

HASH_THREADS = 4  # files hashed in parallel
HASH_CHUNK = 1 << 22  # bytes
MOST_NAMED = 10  # problems
MAX_MANIFEST = 64 << 20  # bytes; it has about 150 for each file
FILE_NAME = re.compile(r"(?!\.{1,2}$|manifest\.json$)[A-Za-z0-9_.-]{1,200}")
FileName = Annotated[str, Check("the name of a checkpoint's file", FILE_NAME.fullmatch)]


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


@dataclass
class FileDigest:
    sha256: Sha256
    bytes: Count


@dataclass
class Manifest:
    files: dict[FileName, FileDigest]

    def __post_init__(self):
        if STATE not in self.files:
            raise ValueError(f"files lacks {STATE}")


def recorded_files(folder: Path) -> dict[str, FileDigest]:
    """What the manifest says of the folder's files, by name. Raises UserError if it is not a valid one."""
    return read(Manifest, file_of(folder, MANIFEST), MAX_MANIFEST).files


def _problem(folder: Path, name: str, recorded: FileDigest) -> str | None:
    try:
        path = file_of(folder, name)
        if not path.is_file():  # a named pipe, for example, which nobody may open
            return f"{name} is missing"
        if path.stat().st_size != recorded.bytes:
            return f"{name} has {path.stat().st_size:,} bytes, recorded {recorded.bytes:,}"
        matches = digest(path)["sha256"] == recorded.sha256
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
        _check_tensors(open_tensors(folder, state).wholes, state)
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


def _check_tensors(found: dict[str, Part], saved: SavedState) -> None:
    """Raises ValueError unless every weight of the model and every tensor that state.json lists is there, in
    its dtype and shape."""
    try:
        model = model_builder.build_model(saved.model_config)  # on the meta device: only the shapes
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"its model cannot be built ({error})") from None
    weights = {f"{WEIGHT}{name}": weight for name, weight in model.named_parameters()}
    listed = saved.tensors if saved.format == FORMAT else _unlisted(saved, model)
    for name in (*weights, *listed):
        if name not in found:
            raise ValueError(f"the tensor {shown(name)} is missing")
        part = found[name]
        is_now = described(part.dtype, part.shape)
        if name in weights and not (part.shape == weights[name].shape and part.dtype.is_floating_point):
            wanted = f"of floating point and {tuple(weights[name].shape)}"
            raise ValueError(f"the tensor {name} is {is_now}, not {wanted}")
        if is_now != listed.get(name, is_now):
            raise ValueError(f"the tensor {shown(name)} is {is_now}, not {shown(listed[name])}")


def _unlisted(saved: SavedState, model: nn.Module) -> dict[str, str]:
    """What the optimizer keeps, in formats that do not list it. They are older than
    --optimizer=package.module, so no such module is imported. Raises ValueError."""
    settings = {name: value for name, value in saved.config.items() if name in KEYS}
    config = TrainConfig(**settings)
    if config.optimizer not in CHOICES["optimizer"].core:
        raise ValueError(f"config.optimizer={shown(config.optimizer)} is none of format {saved.format}")
    kind = optimizer_class(config)
    try:
        return {
            kept_name(name, part): described(dtype, shape)
            for name, weight in model.named_parameters()
            if weight.requires_grad
            for part, (_, shape, dtype) in kind.keeps(name, weight.shape, config).items()
        }
    except KeyError as error:
        raise ValueError(f"its config has the value {error}, which the optimizer does not know") from None
