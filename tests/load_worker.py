"""Run by test_distributed.py under torchrun: loads every checkpoint given with every strategy of this world
size and compares each tensor with what torch's own converter reads from the same files. Exits
with 0 if all agree.

    load_worker.py CONFIG CHECKPOINT_DIR ...
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

import model_builder
from training.checkpoint import TrainState, load_checkpoint
from training.config_file import load_config
from training.distributed import end_process, init_world, launch_info
from training.optimizer import build_optimizer
from training.parallel import parallelize
from training.precision import LossScale


def reference(folder: str) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as scratch:
        dcp_to_torch_save(folder, f"{scratch}/all.pt")
        return torch.load(f"{scratch}/all.pt")


def differences(config, world, folder: str, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not bit-equal after loading, in the optimizer's and the model's view."""
    model_config = config.model_config()
    model = model_builder.build_model(model_config).init_weights("cpu", seed=99)
    strategy = parallelize(model, config, world)
    optimizer = build_optimizer(strategy.shards, config)
    state = TrainState(strategy, optimizer, LossScale(False, world.device), world)
    progress = load_checkpoint(Path(folder), state, model_config)
    assert progress.iteration == 5, progress
    loaded = state.tensors() | {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in loaded.items()}
    assert all(name in expected for name in whole)
    return [name for name, tensor in whole.items() if not torch.equal(tensor, expected[name])]


def main(config_path: str, folders: list[str]) -> None:
    world_size = launch_info()[2]
    fsdp = ["--use_fsdp=True"]
    sharded = [["--use_zero1=True"], fsdp, [*fsdp, "--fsdp_sharding=hybrid"]]
    flags = [*sharded, []] if world_size > 1 else [[]]
    configs = [load_config([config_path, *flag], world_size) for flag in flags]
    world = init_world(configs[0])
    for folder in folders:
        expected = reference(folder)
        for config, flag in zip(configs, flags, strict=True):
            wrong = differences(config, world, folder, expected)
            assert not wrong, (folder, flag, world, wrong)
    if world.is_main:
        print(f"loaded {len(folders) * len(flags)} pairs")
    end_process(world)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
