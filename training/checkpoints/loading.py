"""Loads a checkpoint into a run, or only its weights into a model."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from common.errors import UserError
from model_config import ModelConfig
from training.checkpoints.folder import damaged, read_state, recorded_files
from training.checkpoints.format_1 import METADATA, Format1
from training.checkpoints.tensor_files import SUFFIX, TensorFiles
from training.checkpoints.train_state import Progress, TrainState

FREE_TO_CHANGE = ("arch", "dropout")  # ModelConfig fields that do not change what the weights mean


def check_architecture(folder: Path, saved: dict, wanted: ModelConfig) -> None:
    """Raises UserError that names every field in which the saved model differs from the configured one."""
    differences = [
        f"{name}: checkpoint {saved.get(name)!r}, configuration {value!r}"
        for name, value in wanted.to_dict().items()
        if saved.get(name) != value and name not in FREE_TO_CHANGE
    ]
    if differences:
        raise UserError(f"{folder} holds another architecture: {'; '.join(differences)}")


def load_progress(checkpoint: Path | None, state: TrainState, model_config: ModelConfig) -> Progress:
    """Where a run continues: at its beginning, or at the checkpoint, which is loaded here. All ranks."""
    return load_checkpoint(checkpoint, state, model_config) if checkpoint else Progress(0, 0)


def load_checkpoint(folder: Path, state: TrainState, model_config: ModelConfig) -> Progress:
    """Loads a verified checkpoint into the tensors of `state`, bit for bit. All ranks. Raises UserError."""
    saved = read_state(folder)
    check_architecture(folder, saved["model_config"], model_config)
    reader = _open(folder)
    entries = reader.read_metadata().state_dict_metadata.items()
    saved_sizes = {name: entry.size for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
    optional = {name: t for name, t in state.optional_tensors().items() if saved_sizes.get(name) == t.shape}
    tensors = {**state.tensors(), **optional}
    _load(folder, reader, tensors, no_dist=state.world.size == 1)
    state.after_load(tensors)
    fields = Progress.__dataclass_fields__
    return Progress(**{name: saved[name] for name in fields})


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """Loads only the weights of a verified checkpoint, into one process's model, for sampling and export."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    _load(folder, _open(folder), tensors, no_dist=True)


def _open(folder: Path) -> dcp.StorageReader:
    """A reader of the folder's tensors. Files that the manifest does not list are ignored."""
    try:
        names = recorded_files(folder)
        if METADATA in names:
            return Format1(folder, set(names))
        return TensorFiles([folder / name for name in names if name.endswith(SUFFIX)])
    except (ValueError, OSError) as error:
        raise damaged(folder, [str(error)]) from None


def _load(folder: Path, reader: dcp.StorageReader, tensors: dict[str, torch.Tensor], no_dist: bool) -> None:
    try:
        with _no_group_warning():
            dcp.load(tensors, storage_reader=reader, no_dist=no_dist)
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise UserError(f"{folder} verifies but cannot be loaded: {error}") from error


@contextlib.contextmanager
def _no_group_warning():
    """Hides a warning of DCP: that no process group exists, even if no_dist=True has told it so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
