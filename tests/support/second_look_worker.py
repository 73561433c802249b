"""Run by test_second_look.py under torchrun, two processes: one flipped bit on rank 1, with every strategy.

second_look_worker.py CONFIG.py RESULTS.json
"""

import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch
import torch.distributed as dist
from support.flipped_bits import flip, flip_activation, flip_gradient
from support.graphed_runs import build_run

from training.configuration.files_and_flags import load_config
from training.faults.anomalies import AnomalyPolicy, Diverged
from training.process.exit_status import end_process
from training.process.world import World, gather_objects, init_world

WEIGHT = "blocks.0.ffn.down.weight"
TWO = "--gradient_accumulation_steps=2"
FP8 = ["--dtype=bfloat16"]
STRATEGIES = {
    "ddp": [TWO],
    "ddp, one micro-step": ["--dtype=bfloat16", "--reduce_dtype=bfloat16"],
    "zero1": ["--use_zero1=True", "--dtype=bfloat16", TWO],
    "zero1, one micro-step": ["--use_zero1=True"],
    "fsdp": ["--use_fsdp=True", TWO],
    "fsdp in bf16": ["--use_fsdp=True", "--dtype=bfloat16", "--reduce_dtype=bfloat16", TWO],
    "fsdp, one micro-step": ["--use_fsdp=True"],
    "fsdp, fp8": ["--use_fsdp=True", *FP8, "--low_precision=fp8_delayed", TWO],
    "zero1, fp8": ["--use_zero1=True", *FP8, "--low_precision=fp8_tensorwise", TWO],
}


class Run:
    """One strategy's parts."""

    def __init__(self, config_path: str, strategy: str, world: World):
        parts = build_run([config_path, *STRATEGIES[strategy]], world)
        self.step, self.state, self.config = parts.step, parts.state, parts.config
        self.strategy, self.world = self.state.strategy, world
        self.generator = torch.Generator().manual_seed(world.rank)

    def iterate(self, second_look: bool = False):
        shape = (self.config.micro_steps, 2, 33)
        ids = torch.randint(self.config.model_config().vocab_size, shape, generator=self.generator)
        return self.step(ids[..., :-1], ids[..., 1:], 1e-2, False, second_look)

    def tensors(self) -> list[torch.Tensor]:
        held = {**self.state.tensors(), **self.state.recipe.state()}
        return [tensor.clone() for tensor in held.values()]

    def suffer(self, plant) -> dict:
        """What a second look finds after plant() on rank 1, on all ranks."""
        self.iterate(second_look=True)
        if self.world.rank == 1:
            plant(self.strategy)
        before = self.tensors()
        result = self.iterate(second_look=True)
        updated = len(self.state.tensors())  # the rest is of low precision, which the forward changes
        unchanged = all(map(torch.equal, before[:updated], self.tensors()))
        names = list(self.step.second_look.differences())
        policy = AnomalyPolicy(self.config, self.world, record=None, start=7)
        policy.second_look = self.step.second_look
        policy.add(self.iterate())
        policy.add(result)
        message = "it goes on"
        try:
            policy.read_now()
        except Diverged as error:
            message = str(error)
        everyone = gather_objects(
            (result.verdict.item(), unchanged, names, message, self.iterate(True).verdict.item()), self.world
        )
        found = map(list, zip(*everyone, strict=True))
        return dict(zip(("verdicts", "unchanged", "names", "messages", "next verdicts"), found, strict=True))


def results(config_path: str, strategy: str, world: World) -> dict:
    plain, looking = Run(config_path, strategy, world), Run(config_path, strategy, world)
    expected = [(plain.iterate().loss.item(), plain.tensors()) for _ in range(4)]
    found = [(looking.iterate(i in (0, 2, 3)).loss.item(), looking.tensors()) for i in range(4)]
    same = all(
        a[0] == b[0] and all(map(torch.equal, a[1], b[1])) for a, b in zip(expected, found, strict=True)
    )
    faults = {
        "gradient": lambda strategy: flip_gradient(strategy, 1, WEIGHT),
        "activation": lambda strategy: flip_activation(strategy, 0),
    }
    if strategy == "zero1":  # the first row is rank 0's
        faults["copy"] = lambda strategy: flip(strategy.working_copies()[WEIGHT], bit=3)
    if strategy == "fsdp, fp8":
        layer = "blocks.0.ffn.down"
        faults["copy"] = lambda strategy: flip(strategy.module.get_submodule(layer).quantized.rows, bit=3)
    suffered = {name: Run(config_path, strategy, world).suffer(plant) for name, plant in faults.items()}
    return {"same bits": gather_objects(same, world), **suffered}


def main(config_path: str, path: str) -> None:
    world = init_world(load_config([config_path], 2))
    found = {name: results(config_path, name, world) for name in STRATEGIES}
    if world.is_main:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    end_process(world)


if __name__ == "__main__":
    main(*sys.argv[1:])
