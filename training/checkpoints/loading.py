"""Loads a checkpoint into a run, or only its weights into a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

import model_builder
from model import Attend, Transformer, manual_attention
from training.checkpoints.folder import find_checkpoint
from training.checkpoints.saved_state import SavedState, UnknownFormat, read_state
from training.checkpoints.tensor_files import Part, Place
from training.checkpoints.tensor_reader import TensorFiles
from training.checkpoints.train_state import WEIGHT, Progress, TrainState, whole_parts
from training.checkpoints.verification import damage, damaged, open_tensors, read_parts
from training.process.agreement import agree
from training.process.world import gather_objects

Result = TypeVar("Result")


def load_checkpoint(folder: Path, state: TrainState, without_optimizer: bool = False) -> Progress:
    """Loads a verified checkpoint into the tensors of `state`, bit for bit. without_optimizer: the weights
    alone, not what the optimizer keeps of them. All ranks. Raises UserError, on every rank if on any."""
    world = state.world
    # with a file for each rank, a million headers would be read if every rank read all of them
    mine = agree(world, _checked, folder, read_parts, folder, world.rank, world.size)
    parts = [part for share in gather_objects(mine, world) for part in share]
    saved, optional = agree(world, _load_state, folder, parts, state, without_optimizer)
    state.after_load(optional)
    return saved


def _load_state(
    folder: Path, parts: list[tuple[Part, Place]], state: TrainState, without_optimizer: bool
) -> tuple[SavedState, dict[str, torch.Tensor]]:
    """What the checkpoint says, and those of the optional tensors that it has."""
    saved, reader = _open(folder, parts)
    there = {name: whole.shape for name, whole in reader.wholes.items()}
    optional = {name: t for name, t in state.optional_tensors().items() if there.get(name) == t.shape}
    tensors = state.parts()
    if without_optimizer:
        tensors = {part: tensor for part, tensor in tensors.items() if part.name.startswith(WEIGHT)}
    reader.load_all(tensors | whole_parts(optional), folder)
    return saved, optional


def load_model(
    out_dir: Path, which: str, device: torch.device, attend: Attend = manual_attention
) -> tuple[Path, SavedState, Transformer]:
    """The checkpoint that was found, what it says, and its model with its weights, for sampling. Raises
    UserError."""
    folder = verified_checkpoint(out_dir, which)
    return folder, *load_weights(folder, device, attend)


def load_weights(
    folder: Path, device: torch.device, attend: Attend = manual_attention
) -> tuple[SavedState, Transformer]:
    """Loads only the weights of a verified checkpoint, into one process's model. Raises UserError."""
    saved, reader = _open(folder)
    model = model_builder.build_model(saved.model_config, attend).init_weights(device, seed=0)
    weights = {f"{WEIGHT}{name}": p.detach() for name, p in model.named_parameters()}
    reader.load_all(whole_parts(weights), folder)
    return saved, model


def verified_checkpoint(out_dir: Path, which: str) -> Path:
    """For a command of one process. Raises UserError."""
    folder = find_checkpoint(out_dir, which)
    if problems := damage(folder):
        raise damaged(folder, problems)
    return folder


def _open(folder: Path, parts: list[tuple[Part, Place]] | None = None) -> tuple[SavedState, TensorFiles]:
    saved = _checked(folder, read_state, folder)
    return saved, _checked(folder, open_tensors, folder, saved, parts)


def _checked(folder: Path, action: Callable[..., Result], *arguments: object) -> Result:
    """action(*arguments), which reads this checkpoint. Raises UserError if it finds damage."""
    try:
        return action(*arguments)
    except UnknownFormat:
        raise
    except (ValueError, OSError) as error:
        raise damaged(folder, [str(error)]) from error
