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
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from model_config import ModelConfig
from training.config import RunError, TrainConfig, UserError
from training.distributed import World, gather_objects
from training.precision import LossScale

log = logging.getLogger("nanomfu")

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
WRITER_THREADS = 4  # files per rank, written and hashed side by side
HASH_CHUNK = 1 << 22  # bytes
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
        _delete(stale)
    temporary.mkdir()


def _written_by(name: str, rank: int) -> bool:
    """DCP names its files __RANK_NUMBER.distcp; rank 0 also writes .metadata."""
    return name.startswith(f"__{rank}_") or (rank == 0 and name == ".metadata")


def _commit(temporary: Path, final: Path, files: dict, state: dict, keep_all: bool) -> None:
    """Rank 0 only. The rename is the moment from which the checkpoint exists."""
    _write_synced(temporary / STATE, json.dumps(state, indent=1))
    files[STATE] = _digest(temporary / STATE)
    manifest = {"format": FORMAT, "iteration": state["iteration"], "files": dict(sorted(files.items()))}
    _write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1))
    _sync_folder(temporary)
    if final.exists():  # not one of ours that is complete, or the run would have gone on from it
        os.rename(final, final.with_name(f"{final.name}.set-aside-{uuid.uuid4().hex[:8]}"))
    os.rename(temporary, final)
    _sync_folder(final.parent)
    complete = complete_checkpoints(final.parent)
    best = _lowest_loss(complete)
    _write_pointer(final.parent / "latest", complete[-1].name)
    if best:
        _write_pointer(final.parent / "best", best.name)
    if not keep_all:
        for folder in complete:
            if folder not in (complete[-1], best):
                _delete(folder)


def _lowest_loss(folders: list[Path]) -> Path | None:
    """The best by the losses in the checkpoints themselves: a kill may have left the pointer behind."""
    losses = {folder: _val_loss(folder) for folder in folders}
    evaluated = [folder for folder in folders if losses[folder] is not None]
    return min(evaluated, key=losses.get) if evaluated else None


def _val_loss(folder: Path) -> float | None:
    try:
        return json.loads((folder / STATE).read_text())["val_loss"]
    except (OSError, ValueError, TypeError, KeyError):  # damaged: whoever wants to load it will hear of it
        return None


def _delete(folder: Path) -> None:
    """Renamed first, so that a checkpoint is never seen half deleted; rmtree does not follow links."""
    if folder.is_symlink():
        return
    doomed = folder.with_name(f"{folder.name.split('.tmp-')[0]}.tmp-delete-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:  # an undeletable old checkpoint is no reason to stop training
        log.warning("could not delete %s: %s", folder, error)


def set_aside(out_dir: Path) -> Path | None:
    """Moves an earlier run's checkpoints out of the way of a new one; never deletes them. Rank 0 only."""
    root = out_dir / "checkpoints"
    if not complete_checkpoints(root):
        return None
    aside = out_dir / f"checkpoints-before-{time.strftime('%Y%m%d_%H%M%S')}"
    os.rename(root, aside)
    return aside


# --- finding and loading ---


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoint directories that were committed, oldest first."""
    folders = (p for p in root.glob("step-*") if p.name.removeprefix("step-").isdigit())
    return sorted(p for p in folders if (p / MANIFEST).is_file())


def _warn_about_incomplete(root: Path, complete: list[str]) -> None:
    for path in sorted(root.glob("step-*")):
        if path.name.removeprefix("step-").isdigit() and path.name not in complete:
            log.warning("%s has no %s: it is damaged and is passed over", path, MANIFEST)


def changed_settings(folder: Path, config: TrainConfig) -> dict[str, tuple]:
    """{key: (value in the checkpoint, value now)} for every setting that differs, but for where to start."""
    saved, now = read_state(folder)["config"], config.to_dict()
    return {
        name: (saved.get(name), value)
        for name, value in now.items()
        if saved.get(name) != value and name not in ("init_from", "out_dir")
    }


def find_checkpoint(out_dir: Path, which: str = "latest") -> Path:
    """The newest complete checkpoint of out_dir, or the 'best', or one by its name. Raises UserError."""
    root = out_dir / "checkpoints"
    complete = {folder.name: folder for folder in complete_checkpoints(root)}
    _warn_about_incomplete(root, list(complete))
    if not complete:
        raise UserError(
            f"{root} holds no complete checkpoint to resume or sample from; check --out_dir, "
            "or start a run with --init_from=scratch"
        )
    found = {"latest": list(complete.values())[-1], "best": _lowest_loss(list(complete.values()))} | complete
    if not found.get(which):
        raise UserError(
            f"{root} holds no checkpoint {which!r}; "
            f"there are {', '.join(name for name, folder in found.items() if folder)}"
        )
    return found[which]


def verify_checkpoint(folder: Path, world: World) -> None:
    """Compares every file with the manifest. All ranks, each its share. UserError names the bad files."""
    try:
        files = sorted(json.loads((folder / MANIFEST).read_text())["files"].items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({error})") from None
    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        mine = pool.map(lambda item: _problem(folder, *item), files[world.rank :: world.size])
    problems = [p for part in gather_objects(list(mine), world) for p in part if p]
    if problems:
        raise _damaged(folder, "; ".join(problems))


def _problem(folder: Path, name: str, recorded: dict) -> str | None:
    path = folder / name
    if os.path.basename(name) != name or not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != recorded["bytes"]:
        return f"{name} has {path.stat().st_size:,} bytes, recorded {recorded['bytes']:,}"
    if _digest(path) != recorded:
        return f"{name} does not match its sha256"
    return None


def _damaged(folder: Path, problem: str) -> UserError:
    others = [p.name for p in complete_checkpoints(folder.parent) if p != folder]
    older = f"rename that folder to resume from {others[-1]} instead" if others else "there is no other one"
    return UserError(f"the checkpoint {folder} is damaged: {problem}; {older}")


def read_state(folder: Path) -> dict:
    """state.json of a verified checkpoint."""
    try:
        state = json.loads((folder / STATE).read_text())
        version, _ = state["format"], state["model_config"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(folder, f"{STATE} cannot be read ({error})") from None
    if version != FORMAT:
        raise UserError(f"{folder} has checkpoint format {version}; this version reads {FORMAT}")
    return state


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
    with ThreadPoolExecutor(WRITER_THREADS) as pool:  # hashing releases the interpreter lock
        return dict(zip([path.name for path in paths], pool.map(_digest, paths), strict=True))


def _digest(path: Path) -> dict:
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK):
            sha256.update(chunk)
    return {"sha256": sha256.hexdigest(), "bytes": path.stat().st_size}


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_pointer(path: Path, name: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    _write_synced(temporary, name + "\n")
    os.replace(temporary, path)
