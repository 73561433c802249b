"""Run by test_strategies.py, alone or under torchrun: loads every checkpoint given
with every strategy at this world size and compares each tensor with what the safetensors library reads from
the same files. Exits with 0 if all agree.

    load_worker.py CONFIG [--save=FOLDER] [--KEY=VALUE ...] CHECKPOINT_DIR[=OTHER_DIR] ...

With --save, each strategy first saves what it has loaded from the first checkpoint to FOLDER/STRATEGY-SIZE,
and these are loaded, too. With OTHER_DIR, every tensor must be that of this other checkpoint. In one process,
ZeRO-1 and FSDP shard over one rank, which train.py would refuse.
"""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch
import torch.distributed as dist
from support.checkpoint_parts import make_saver
from support.helpers import checkpoint_tensors
from torch.distributed.tensor import DTensor

import model_builder
from training.checkpoints.loading import load_checkpoint
from training.checkpoints.train_state import Progress, TrainState
from training.configuration.files_and_flags import load_config
from training.optimization.optimizer import build_optimizer
from training.optimization.precision import LossScale
from training.process.exit_status import end_process
from training.process.launch import launch_info
from training.process.world import init_world
from training.strategies.fsdp import Fsdp
from training.strategies.replicated import Replicated
from training.strategies.zero1 import Zero1

STRATEGIES = {
    "ddp": ([], Replicated),
    "zero1": (["--use_zero1=True"], Zero1),
    "fsdp": (["--use_fsdp=True"], Fsdp),
    "hybrid": (["--use_fsdp=True", "--fsdp_sharding=hybrid"], Fsdp),
}


def load(name: str, settings: list[str], world, folder: str):
    """(settings, state, where it stands) of a model that was drawn anew and then loaded the checkpoint."""
    flags, strategy_class = STRATEGIES[name]
    config = load_config([*settings, *flags], max(world.size, 2))  # one is refused for sharding
    model = model_builder.build_model(config.model_config()).init_weights("cpu", seed=99)
    strategy = strategy_class(model, config, world)
    optimizer = build_optimizer(strategy.shards, config)
    state = TrainState(strategy, optimizer, LossScale(False, world.device), world)
    return config, state, load_checkpoint(Path(folder), state)


def differences(state: TrainState, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not bit-equal after loading, in the optimizer's and the model's view."""
    wrong = []
    for part, tensor in state.parts().items():
        whole = expected[part.name]
        rows = whole[part.offsets[0] : part.end] if part.shape else whole
        wrong += [] if torch.equal(tensor, rows) else [part.name]
    for name, p in state.strategy.module.named_parameters():
        whole = p.full_tensor() if isinstance(p, DTensor) else p
        wrong += [] if torch.equal(whole.detach(), expected[f"model.{name}"]) else [f"working {name}"]
    return wrong


def save(config, state: TrainState, progress, out_dir: Path) -> Path:
    saver = make_saver(config, state)
    out_dir.mkdir(parents=True, exist_ok=True)  # a save makes its folder, not those above it
    saver.root = out_dir / "checkpoints"
    saver.begin(Progress(progress.iteration, progress.samples_seen))
    return saver.completed(wait=None).final


def main(settings: list[str], folders: list[str], save_to: str | None) -> None:
    others = dict(text.split("=", 1) for text in folders if "=" in text)
    folders = [text.split("=", 1)[0] for text in folders]
    world_size = launch_info()[2]
    names = ["ddp", "zero1", "fsdp"] + ["hybrid"] * (world_size > 1)
    world = init_world(load_config(settings, world_size))
    if world.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if save_to:
        loads = {name: load(name, settings, world, folders[0]) for name in names}
        folders = [
            *folders,
            *(save(*found, Path(save_to) / f"{n}-{world.size}") for n, found in loads.items()),
        ]
    iteration = int(Path(folders[0]).name.removeprefix("step-"))  # of all: copies are of the first
    for folder in folders:
        expected = checkpoint_tensors(others.get(folder, folder))
        for name in names:
            _, state, progress = load(name, settings, world, folder)
            assert progress.iteration == iteration, progress
            wrong = differences(state, expected)
            assert not wrong, (folder, name, world, wrong)
    if world.is_main:
        print(f"loaded {len(folders) * len(names)} pairs", flush=True)
    end_process(world)


if __name__ == "__main__":
    options = [text for text in sys.argv[2:] if text.startswith("--")]
    rest = [text for text in sys.argv[2:] if not text.startswith("--")]
    save_to = [text.split("=", 1)[1] for text in options if text.startswith("--save=")]
    keys = [text for text in options if not text.startswith("--save=")]
    main([sys.argv[1], *keys], rest, save_to[0] if save_to else None)
