"""Checkpoints. One directory each, complete or absent:

    out_dir/checkpoints/step-00001000/  tensors-RANK-N.safetensors  weights, Adam moments, RNG states
                                        state.json     iteration, samples seen, losses, configurations, data
                                        manifest.json  sha256 and size of every file above
    out_dir/checkpoints/latest, best    the names of the newest complete one and of the best

training/checkpoints/saver.py writes one beside its final place, hashes, syncs and renames it; only then the pointers move
and older ones go (training/checkpoints/retention.py). Tensors are stored by parameter name and place in the whole, so any
strategy at any world size loads what any other saved. Nothing in a checkpoint can execute code.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from model_config import ModelConfig
from training.checkpoints.folder import damaged, read_state, recorded_files
from training.checkpoints.format_1 import METADATA, Format1
from training.checkpoints.tensor_files import SUFFIX, TensorFiles
from training.configuration.errors import UserError
from training.optimization.precision import LossScale
from training.optimization.update_guard import Health
from training.process.world import World

FREE_TO_CHANGE = ("arch", "dropout")  # ModelConfig fields that do not change what the weights mean


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything a resume needs that is not a tensor."""

    iteration: int  # optimizer updates done
    samples_seen: int  # sequences, over all GPUs
    best_val_loss: float | None = None
    val_loss: float | None = None


class TrainState:
    """The tensors of a run by name, each as the whole it is part of. Loading writes into them in place."""

    def __init__(
        self, strategy, optimizer, loss_scale: LossScale, world: World, health: Health | None = None
    ):
        self.strategy, self.optimizer, self.loss_scale, self.world = strategy, optimizer, loss_scale, world
        self.health = health

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for shard in self.strategy.shards:
            adam = self.optimizer.state[shard.local]
            tensors[f"model.{shard.name}"] = self.strategy.as_global(shard, shard.local.detach())
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"optimizer.{shard.name}.{moment}"] = self.strategy.as_global(shard, adam[moment])
            tensors[f"optimizer.{shard.name}.step"] = adam["step"]
        return tensors

    def optional_tensors(self) -> dict[str, torch.Tensor]:
        """Present only if the run that saved had them: this rank's generators, float16's loss scale, the
        window that spikes are judged by."""
        tensors = {f"loss_scale.{name}": t for name, t in self.loss_scale.state().items()}
        if self.health:
            tensors |= {f"health.{name}": t for name, t in self.health.state().items()}
        tensors[f"rng.{self.world.rank}.cpu"] = torch.get_rng_state()
        if self.world.device.type == "cuda":
            tensors[f"rng.{self.world.rank}.cuda"] = torch.cuda.get_rng_state(self.world.device)
        return tensors

    def after_load(self, loaded: dict[str, torch.Tensor]) -> None:
        """Spreads the loaded shards and sets this rank's generators."""
        self.strategy.publish()
        cpu, cuda = (loaded.get(f"rng.{self.world.rank}.{kind}") for kind in ("cpu", "cuda"))
        if cpu is not None:
            torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.world.device)


# --- loading ---


def check_architecture(folder: Path, saved: dict, wanted: ModelConfig) -> None:
    """Raises UserError naming every field in which the saved model differs from the configured one."""
    differences = [
        f"{name}: checkpoint {saved.get(name)!r}, configuration {value!r}"
        for name, value in wanted.to_dict().items()
        if saved.get(name) != value and name not in FREE_TO_CHANGE
    ]
    if differences:
        raise UserError(f"{folder} holds another architecture: {'; '.join(differences)}")


def load_checkpoint(folder: Path, state: TrainState, model_config: ModelConfig) -> Progress:
    """Loads a checkpoint into state's tensors, bit for bit. Verify first. All ranks. Raises UserError."""
    saved = read_state(folder)
    check_architecture(folder, saved["model_config"], model_config)
    reader = _open(folder)
    there = {name: tensor.size for name, tensor in reader.metadata.state_dict_metadata.items()}
    optional = {name: t for name, t in state.optional_tensors().items() if there.get(name) == t.shape}
    tensors = {**state.tensors(), **optional}
    _load(folder, reader, tensors, no_dist=state.world.size == 1)
    state.after_load(tensors)
    fields = Progress.__dataclass_fields__
    return Progress(**{name: saved[name] for name in fields})


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """The weights alone, into one process's model, for sampling and export. Verify first."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    _load(folder, _open(folder), tensors, no_dist=True)


def _open(folder: Path) -> dcp.StorageReader:
    """A reader of the folder's tensors. Files that the manifest does not list are not looked at."""
    try:
        names = recorded_files(folder)
        if METADATA in names:
            return Format1(folder, set(names))
        return TensorFiles([folder / name for name in names if name.endswith(SUFFIX)])
    except (ValueError, OSError) as error:
        raise damaged(folder, [str(error)]) from None


def _load(folder: Path, reader: dcp.StorageReader, tensors: dict[str, torch.Tensor], no_dist: bool) -> None:
    try:
        with _one_process_is_fine():
            dcp.load(tensors, storage_reader=reader, no_dist=no_dist)
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise UserError(f"{folder} verifies but cannot be loaded: {error}") from error


@contextlib.contextmanager
def _one_process_is_fine():
    """DCP warns that no process group exists even when it is told that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
