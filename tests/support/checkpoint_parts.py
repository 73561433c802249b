"""What the test_checkpoint files share: a tiny model's state without a run around it, and ranks as processes
that need no process group, because a save needs none."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from support.helpers import TINY, checkpoint_tensors, edit_json

import model_builder
from training.checkpoints.saver import Saver
from training.checkpoints.staging import Staging, plan_parts
from training.checkpoints.tensor_files import read_header, write_parts
from training.checkpoints.train_state import Progress, TrainState
from training.checkpoints.verification import digest
from training.configuration.keys import TrainConfig
from training.optimization.optimizer import build_optimizer
from training.optimization.precision import LossScale
from training.process.world import ALONE, World
from training.strategies.parallelize import parallelize

SMALL = {**TINY, "n_layer": 1, "n_embd": 8, "n_head": 2, "num_key_value_heads": 1, "d_ff": 16}


def make_config(out_dir: Path, **keys) -> TrainConfig:
    return TrainConfig(**{**SMALL, "out_dir": str(out_dir), **keys})


def make_state(config: TrainConfig, seed: int = 1, world: World = ALONE) -> TrainState:
    """Weights and moments that are all different, and none of them zero."""
    model = model_builder.build_model(config.model_config()).init_weights(world.device, seed)
    strategy = parallelize(model, config, replace(ALONE, device=world.device))
    optimizer = build_optimizer(strategy.shards, config)
    state = TrainState(strategy, optimizer, LossScale(False, world.device), world)
    change(state, seed)
    return state


@torch.no_grad()
def change(state: TrainState, seed: int) -> None:
    """In place, as an update does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.tensors().values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def copies(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


def make_saver(config: TrainConfig, state: TrainState, start: int = 0) -> Saver:
    data = {"sha256": "0" * 64, "tokenizer": {"name": None, "sha256": None}, "splits": {}}
    Path(config.out_dir).mkdir(parents=True, exist_ok=True)  # as a run does that locks it
    return Saver(config, state, {"run": "run_20260101_000000", "data": data}, start)


def save(saver: Saver, iteration: int, val_loss: float | None = None) -> Path:
    saver.begin(Progress(iteration, 10 * iteration, val_loss, val_loss))
    return saver.completed(wait=None).final


def sign(folder: Path) -> None:
    """The manifest of whoever can write to the folder: it matches whatever is there."""
    files = {path.name: digest(path) for path in folder.iterdir() if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def copy_checkpoint(folder: Path, root: Path, step: int, **fields: object) -> Path:
    """A copy of a checkpoint as that of another iteration, with these fields of state.json."""
    copy = shutil.copytree(folder, root / f"step-{step:08d}")
    edit_json(copy / "state.json", **{"iteration": step, **fields})
    sign(copy)
    return copy


def halves(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a gated model as checkpoints of format 2 have it: in ffn.up and its moments all rows of
    gate, then all rows of up."""
    is_up = ".ffn.up." in name and tensor.ndim
    return torch.cat([tensor[0::2], tensor[1::2]]) if is_up else tensor


def as_format_2(folder: Path, to: Path) -> Path:
    """A copy of a gated model's checkpoint as an earlier version of nanoMFU would have saved it, in the same
    parts."""
    copy, tensors = shutil.copytree(folder, to), checkpoint_tensors(folder)
    for path in copy.glob("*.safetensors"):
        parts = []
        for part in read_header(path):
            whole = halves(part.name, tensors[part.name])
            parts.append((part, whole[part.offsets[0] : part.end].clone() if part.shape else whole))
        path.unlink()
        write_parts(path, parts)
    edit_json(copy / "state.json", format=2)
    sign(copy)
    return copy


def make_ranks(
    config: TrainConfig, ranks: int, seed: int = 1, start: int = 0, run: str = "run"
) -> list[Saver]:
    """Savers of equal states, as DDP has them; `run` is the name that prepare() would have agreed on."""
    savers = []
    for rank in range(ranks):
        world = replace(ALONE, rank=rank, local_rank=rank, size=ranks, local_size=ranks)
        saver = make_saver(config, make_state(config, seed, world), start)
        everything, saver.bytes = plan_parts(saver.state.all_parts(), ALONE, None)
        shared = [part for part in everything if not part.name.startswith("rng.")]
        own = [part for part in everything if part.name.startswith("rng.")]
        saver.parts, saver.run = [*shared[rank::ranks], *own], run
        saver.staging = Staging(saver.parts, world.device)
        savers.append(saver)
    return savers


def in_processes(savers: list[Saver], iteration: int, prepare=lambda rank: None) -> list[int]:
    """Each rank saves in a forked process after prepare(rank); their exit statuses, negative if by a signal.
    Once one is killed the others are stopped, as torchrun would do it."""
    children = []
    for rank, saver in enumerate(savers):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                prepare(rank)
                save(saver, iteration)
                os._exit(0)
            except BaseException:
                os._exit(1)
        children.append(pid)
    statuses, waiting = {}, set(children)
    while waiting:
        pid, status = os.wait()
        if pid not in waiting:
            continue
        waiting.discard(pid)
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if statuses[pid] < 0:
            for other in waiting:
                os.kill(other, 9)
    for saver in savers:
        saver.count += 1  # as in the processes
    return [statuses[pid] for pid in children]
