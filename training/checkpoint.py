"""Checkpoints. One directory each, complete or absent:

    out_dir/checkpoints/step-00001000/  *.distcp, .metadata  tensors: weights, Adam moments, RNG states
                                        state.json           iteration, samples seen, losses, configurations
                                        manifest.json        sha256 and size of every file above
    out_dir/checkpoints/latest, best    the names of the newest complete one and of the best

A checkpoint is written beside its final place, hashed, synced and renamed; only then do the pointers move and
older ones go. Tensors are stored by parameter name and whole shape through torch.distributed.checkpoint, so
any strategy at any world size loads what any other saved. Nothing is unpickled before its hash is verified.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from model_config import ModelConfig
from training.checkpoint_folder import (
    FORMAT,
    HASH_THREADS,
    MANIFEST,
    STATE,
    complete_checkpoints,
    delete,
    digest,
    lowest_loss,
    read_state,
    sync_folder,
    verify_checkpoint,
    write_pointer,
    write_synced,
)
from training.config import RunError, TrainConfig, UserError
from training.distributed import World, gather_objects
from training.precision import LossScale

WRITER_THREADS = 4  # files per rank, written side by side
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

    def __init__(self, strategy, optimizer, loss_scale: LossScale, world: World):
        self.strategy, self.optimizer, self.loss_scale, self.world = strategy, optimizer, loss_scale, world

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
        """Present only if the run that saved had them: this rank's generators, float16's loss scale."""
        tensors = {f"loss_scale.{name}": t for name, t in self.loss_scale.state().items()}
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


# --- saving ---


def save_checkpoint(
    out_dir: Path,
    state: TrainState,
    progress: Progress,
    config: TrainConfig,
    model_config: ModelConfig,
) -> Path:
    """Writes out_dir/checkpoints/step-N and moves the pointers. All ranks. Raises RunError on every rank if
    any of them failed; the checkpoints that were there before are then untouched."""
    world, root = state.world, out_dir / "checkpoints"
    final = root / f"step-{progress.iteration:08d}"
    temporary = gather_objects(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}", world)[0]
    temporary = root / temporary
    _agree_on_main(world, _begin, root, temporary)
    tensors = {**state.tensors(), **state.optional_tensors()}
    writer = dcp.FileSystemWriter(temporary, thread_count=WRITER_THREADS)
    try:
        with _one_process_is_fine():
            # raises on every rank or on none
            dcp.save(tensors, storage_writer=writer, no_dist=world.size == 1)
    except (dcp.api.CheckpointException, OSError) as error:
        raise RunError(f"could not write the checkpoint {final}: {error}") from error
    hashes = _agree(world, _digests_of_mine, temporary, world.rank)
    files = {name: digest for part in hashes for name, digest in part.items()}
    description = {
        "format": FORMAT,
        **progress.__dict__,
        "world_size": world.size,
        "config": config.to_dict(),
        "model_config": model_config.to_dict(),
    }
    _agree_on_main(world, _commit, temporary, final, files, description, config.keep_all_checkpoints)
    return final


def _begin(root: Path, temporary: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob("step-*.tmp-*"):
        delete(stale)
    temporary.mkdir()


def _written_by(name: str, rank: int) -> bool:
    """DCP names its files __RANK_NUMBER.distcp; rank 0 also writes .metadata."""
    return name.startswith(f"__{rank}_") or (rank == 0 and name == ".metadata")


def _commit(temporary: Path, final: Path, files: dict, state: dict, keep_all: bool) -> None:
    """Rank 0 only. The rename is the moment from which the checkpoint exists."""
    write_synced(temporary / STATE, json.dumps(state, indent=1))
    files[STATE] = digest(temporary / STATE)
    manifest = {"format": FORMAT, "iteration": state["iteration"], "files": dict(sorted(files.items()))}
    write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1))
    sync_folder(temporary)
    if final.exists():  # not one of ours that is complete, or the run would have gone on from it
        os.rename(final, final.with_name(f"{final.name}.set-aside-{uuid.uuid4().hex[:8]}"))
    os.rename(temporary, final)
    sync_folder(final.parent)
    complete = complete_checkpoints(final.parent)
    best = lowest_loss(complete)
    write_pointer(final.parent / "latest", complete[-1].name)
    if best:
        write_pointer(final.parent / "best", best.name)
    if not keep_all:
        for folder in complete:
            if folder not in (complete[-1], best):
                delete(folder)


# --- loading ---


def changed_settings(folder: Path, config: TrainConfig) -> dict[str, tuple]:
    """{key: (value in the checkpoint, value now)} for every setting that differs, but for where to start."""
    saved, now = read_state(folder)["config"], config.to_dict()
    return {
        name: (saved.get(name), value)
        for name, value in now.items()
        if saved.get(name) != value and name not in ("init_from", "out_dir")
    }


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
    """Verifies the checkpoint and loads it into state's tensors, bit for bit. All ranks. Raises UserError."""
    verify_checkpoint(folder, state.world)
    saved = read_state(folder)
    check_architecture(folder, saved["model_config"], model_config)
    there = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    optional = {name: t for name, t in state.optional_tensors().items() if name in there}
    tensors = {**state.tensors(), **optional}
    _load(folder, tensors, no_dist=state.world.size == 1)
    state.after_load(tensors)
    fields = Progress.__dataclass_fields__
    return Progress(**{name: saved[name] for name in fields})


def load_weights(folder: Path, model: torch.nn.Module) -> None:
    """The weights alone, into one process's model, for sampling and export. Verify first."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    _load(folder, tensors, no_dist=True)


def _load(folder: Path, tensors: dict[str, torch.Tensor], no_dist: bool) -> None:
    try:
        with _one_process_is_fine():
            dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=no_dist)
    except (dcp.api.CheckpointException, OSError, RuntimeError) as error:
        raise UserError(f"{folder} verifies but cannot be loaded: {error}") from error


@contextlib.contextmanager
def _one_process_is_fine():
    """DCP warns that no process group exists even when it is told that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


# --- files ---


def _agree(world: World, action, *arguments) -> list:
    """What action returned on rank 0, on rank 1, ...; if it fails on any, RunError on all. All ranks."""
    result = failure = None
    try:
        result = action(*arguments)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = f"rank {world.rank} could not write the checkpoint: {type(error).__name__}: {error}"
    results = gather_objects((result, failure), world)
    failures = [failure for _, failure in results if failure]
    if failures:
        raise RunError("; ".join(failures))
    return [result for result, _ in results]


def _agree_on_main(world: World, action, *arguments) -> None:
    """Rank 0 alone acts; if it fails, RunError on all. All ranks."""
    _agree(world, lambda: action(*arguments) if world.is_main else None)


def _digests_of_mine(folder: Path, rank: int) -> dict[str, dict]:
    """{name: digest} of the files that this rank wrote."""
    paths = [path for path in folder.iterdir() if _written_by(path.name, rank)]
    with ThreadPoolExecutor(HASH_THREADS) as pool:  # hashing releases the interpreter lock
        return dict(zip([path.name for path in paths], pool.map(digest, paths), strict=True))
