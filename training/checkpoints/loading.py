"""Loads a checkpoint into a run, or only its weights into a model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import model_builder
from common.errors import UserError
from model import Attend, Transformer, manual_attention
from model_config import ModelConfig
from training.checkpoints.folder import MANIFEST, find_checkpoint
from training.checkpoints.saved_state import SavedState, read_state
from training.checkpoints.train_state import Progress, TrainState
from training.checkpoints.verification import damaged, open_tensors, verify_checkpoint
from training.process.world import World, gather_objects

T = TypeVar("T")

DELETIONS = 10  # of checkpoints that a run deletes while they are read, one after another
FREE_TO_CHANGE = ("arch", "dropout")  # ModelConfig fields that do not change what the weights mean


def check_architecture(folder: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    """Raises UserError that names every field in which the saved model differs from the configured one."""
    was = saved.to_dict()
    differences = [
        f"{name}: checkpoint {was[name]!r}, configuration {value!r}"
        for name, value in wanted.to_dict().items()
        if was[name] != value and name not in FREE_TO_CHANGE
    ]
    if differences:
        raise UserError(
            f"{folder} holds another architecture: {'; '.join(differences)}; restore these keys, or choose "
            "another --out_dir for the new model"
        )


def load_checkpoint(folder: Path, state: TrainState, model_config: ModelConfig) -> Progress:
    """Loads a verified checkpoint into the tensors of `state`, bit for bit. All ranks. Raises UserError, on
    every rank if on any."""
    opened = _open(folder)
    failures = gather_objects(opened if isinstance(opened, UserError) else None, state.world)
    if failure := next(filter(None, failures), None):
        raise failure
    assert not isinstance(opened, UserError)
    saved, reader = opened
    check_architecture(folder, saved.model_config, model_config)
    entries = reader.read_metadata().state_dict_metadata.items()
    saved_sizes = {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
    optional = {name: t for name, t in state.optional_tensors().items() if saved_sizes.get(name) == t.shape}
    tensors = {**state.tensors(), **optional}
    _load(folder, reader, tensors, no_dist=state.world.size == 1)
    state.after_load(tensors)
    losses = saved.best_val_loss, saved.val_loss, saved.measure, saved.measured_since
    return Progress(saved.iteration, saved.samples_seen, *losses)


def load_model(
    out_dir: Path, which: str, device: torch.device, attend: Attend = manual_attention
) -> tuple[Path, SavedState, Transformer]:
    """The checkpoint that was found, what it says, and its model with its weights, for sampling. Raises
    UserError."""
    return with_checkpoint(out_dir, which, lambda folder: (folder, *load_weights(folder, device, attend)))


def with_checkpoint(out_dir: Path, which: str, use: Callable[[Path], T]) -> T:
    """use(the verified checkpoint). One that the run deletes meanwhile is replaced by the next newest. Raises
    UserError."""
    for _ in range(DELETIONS):
        folder = find_checkpoint(out_dir, which)
        try:
            verify_checkpoint(folder, World(rank=0, local_rank=0, size=1, device=torch.device("cpu")))
            return use(folder)
        except (UserError, FileNotFoundError):
            if is_there(folder):
                raise
    raise deleted_too_fast(out_dir)


def load_weights(
    folder: Path, device: torch.device, attend: Attend = manual_attention
) -> tuple[SavedState, Transformer]:
    """Loads only the weights of a verified checkpoint, into one process's model. Raises UserError."""
    opened = _open(folder)
    if isinstance(opened, UserError):
        raise opened
    saved, reader = opened
    model = model_builder.build_model(saved.model_config, attend).init_weights(device, seed=0)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    _load(folder, reader, tensors, no_dist=True)
    return saved, model


def is_there(folder: Path) -> bool:
    """False if the run has deleted the checkpoint. A damaged one is still there."""
    return (folder / MANIFEST).is_file()


def deleted_too_fast(out_dir: Path) -> UserError:
    return UserError(
        f"the run in {out_dir} deleted {DELETIONS} checkpoints while they were read; raise its --keep_last"
    )


def _open(folder: Path) -> tuple[SavedState, dcp.StorageReader] | UserError:
    try:
        saved = read_state(folder)
        return saved, open_tensors(folder, saved)
    except UserError as error:
        return error
    except (ValueError, OSError) as error:
        return damaged(folder, [str(error)])


def _load(folder: Path, reader: dcp.StorageReader, tensors: dict[str, torch.Tensor], no_dist: bool) -> None:
    try:
        with no_group_warning():
            dcp.load(tensors, storage_reader=reader, no_dist=no_dist)
    except (dcp.api.CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{folder} verifies but cannot be loaded: {error}") from error


@contextlib.contextmanager
def no_group_warning():
    """Hides a warning of DCP: that no process group exists, even if no_dist=True has told it so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
