"""Run by tests under torchrun: every strategy makes Muon's updates from the same gradients, and
each rank compares its rows with those that it computes alone, bit for bit. Exits with 0 if all agree.

    muon_worker.py CONFIG [--KEY=VALUE ...]
"""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch

import model_builder
from training.configuration.files_and_flags import load_config
from training.optimization.optimizer import build_optimizer
from training.process.exit_status import end_process
from training.process.launch import launch_info
from training.process.world import World, init_world
from training.strategies.parallelize import parallelize

STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}
DTYPES = ("bfloat16", "float32", "float16")  # on GPUs the first
UPDATES = 3


def updated(settings: list[str], world: World) -> dict[str, tuple[int, torch.Tensor]]:
    """Name of a weight -> index of this rank's first element, and its part after some updates."""
    config = load_config(settings, world.size)
    model = model_builder.build_model(config.model_config()).init_weights(world.device, seed=5)
    strategy = parallelize(model, config, world)
    optimizer = build_optimizer(strategy.shards, config, strategy.row_group)
    scale, zero, rate = (torch.full((), value, device=world.device) for value in (2.0, 0.0, 0.02))
    for i in range(UPDATES):
        for number, shard in enumerate(strategy.shards):
            generator = torch.Generator().manual_seed(100 * i + number)
            whole = torch.randn(shard.parameter.shape, generator=generator).to(world.device)
            mine = whole.view(-1)[shard.start : shard.start + shard.local.numel()].view_as(shard.local)
            shard.local.grad = mine.to(shard.local.dtype)
        optimizer.step(rate, scale, zero)
    return {shard.name: (shard.start, shard.local.detach().view(-1)) for shard in strategy.shards}


def main(settings: list[str]) -> None:
    world = init_world(load_config(settings, launch_info()[2]))
    for dtype in DTYPES if world.device.type == "cpu" else DTYPES[:1]:
        of_dtype = [*settings, f"--dtype={dtype}"]
        whole = updated(of_dtype, World(0, 0, 1, world.device))
        for name, flags in STRATEGIES.items():
            for weight, (start, part) in updated([*of_dtype, *flags], world).items():
                alone = whole[weight][1][start : start + len(part)]
                assert torch.equal(part, alone), (dtype, name, weight, world, (part - alone).abs().max())
    if world.is_main:
        print(f"equal on {world.size} processes", flush=True)
    end_process(world)


if __name__ == "__main__":
    main(sys.argv[1:])
