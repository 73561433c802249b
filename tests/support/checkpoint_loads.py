"""What test_strategies.py lets ranks do: load every checkpoint by every strategy."""

from pathlib import Path

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
from training.process.world import World
from training.strategies.fsdp import Fsdp
from training.strategies.replicated import Replicated
from training.strategies.zero1 import Zero1

STRATEGIES = {
    "ddp": ([], Replicated),
    "zero1": (["--use_zero1=True"], Zero1),
    "fsdp": (["--use_fsdp=True"], Fsdp),
    "hybrid": (["--use_fsdp=True", "--fsdp_sharding=hybrid"], Fsdp),
}


def load(name: str, settings: list[str], world: World, folder: str):
    """(settings, state, where it stands) of a model that was drawn anew and then loaded the checkpoint. Also
    on one rank ZeRO-1 and FSDP shard, which train.py would refuse."""
    flags, strategy_class = STRATEGIES[name]
    config = load_config([*settings, *flags], max(world.size, 2))
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


def save(config, state: TrainState, progress, out_dir: Path) -> str:
    saver = make_saver(config, state)
    out_dir.mkdir(parents=True, exist_ok=True)  # a save makes its folder, not those above it
    saver.root = out_dir / "checkpoints"
    saver.begin(Progress(progress.iteration, progress.samples_seen))
    return str(saver.finished(wait=None).final)


def load_all(world: World, *arguments: str) -> int:
    """CONFIG.py, --KEY=VALUE, CHECKPOINT_DIR[=OTHER_DIR]: loads every checkpoint with every strategy at this
    world size, and compares each tensor with what the safetensors library reads from the same files, or from
    this other checkpoint. With --save=FOLDER, each strategy first saves what it has loaded from the first
    checkpoint to FOLDER/STRATEGY-SIZE, and these are loaded, too. The number of loads."""
    settings = [text for text in arguments if text.endswith(".py") or text.startswith("--")]
    save_to = [text.partition("=")[2] for text in settings if text.startswith("--save=")]
    settings = [text for text in settings if not text.startswith("--save=")]
    pairs = [text.partition("=")[::2] for text in arguments if not text.endswith(".py") and text[:2] != "--"]
    names = ["ddp", "zero1", "fsdp"] + ["hybrid"] * (world.size > 1)
    if world.size == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if save_to:
        loads = {name: load(name, settings, world, pairs[0][0]) for name in names}
        folders = {name: Path(save_to[0]) / f"{name}-{world.size}" for name in names}
        pairs += [(save(*found, folders[name]), "") for name, found in loads.items()]
    iteration = int(Path(pairs[0][0]).name.removeprefix("step-"))  # of all: copies are of the first
    for folder, other in pairs:
        expected = checkpoint_tensors(other or folder)
        for name in names:
            _, state, progress = load(name, settings, world, folder)
            assert progress.iteration == iteration, progress
            wrong = differences(state, expected)
            assert not wrong, (folder, name, world, wrong)
    return len(pairs) * len(names)
