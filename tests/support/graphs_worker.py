"""Run by test_sharded_captures.py under torchrun, two processes: what the gate of CUDA Graphs does with
sharded runs, with a fake in place of CUDA.

graphs_worker.py DATASET RESULTS.json
"""

import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch
import torch.distributed as dist
from support.graphed_runs import Fake, build, graphed, same, train, weights

from training.configuration.keys import TrainConfig
from training.evaluation import evaluate
from training.process.exit_status import end_process
from training.process.world import World, gather_objects, init_world

ZERO1 = {"use_zero1": True, "gradient_accumulation_steps": 2, "vocab_size": 65}  # rows that 2 does not divide
OVERLAP = {**ZERO1, "overlap_param_gather": True}
CASES = {
    "plain": ZERO1,
    "overlapped": OVERLAP,
    "overlapped fp8": {
        **OVERLAP,
        "vocab_size": 64,
        "dtype": "bfloat16",
        "low_precision": "fp8_tensorwise",
    },
}


class NeverDone:
    """A transfer that a capture recorded, outside of it: it does not run, so a wait for it fails."""

    def wait(self):
        raise RuntimeError("waited for what was only recorded")


def check_replays(dataset: str, world: World, keys: dict) -> dict:
    """An eager run, and one that is captured, with evaluations and an iteration of another shape between."""
    eager, parts = build(dataset, world, **keys), build(dataset, world, **keys)
    torch.manual_seed(7)
    left: list[bool] = []  # whether a capture or a replay leaves weights on their way

    def noted(run, fake):
        def replay():
            left.append(bool(parts.state.strategy.gathers))
            packed = run()
            left.append(bool(parts.state.strategy.gathers))
            return packed

        return replay

    step = graphed(parts, Fake(noted))
    found = [run_with_interruptions(each, run) for each, run in ((eager, eager.step), (parts, step))]
    equal = found[0] == found[1] and same(weights(parts), weights(eager))
    return {"choice": step.choice, "equal": equal, "on their way": any(left), "replays": len(left) // 2}


def run_with_interruptions(parts, step) -> list:
    world, results = parts.state.world, train(parts, step, range(12))
    results.append(evaluate(parts.state.strategy.module, parts.windows, parts.config, world))
    results += train(parts, step, range(12, 14))
    x, y = parts.loader.next()
    result = step(x[:, :2].contiguous(), y[:, :2].contiguous(), 1e-3)
    results.append((result.loss.item(), result.grad_norm.item()))
    return results + train(parts, step, range(14, 22))


def check_failure(dataset: str, world: World, keys: dict) -> dict:
    """A capture that fails on rank 1 alone, in the middle of an iteration."""
    eager, parts = build(dataset, world, **keys), build(dataset, world, **keys)
    expected = train(eager)

    def fails(run, fake):
        strategy = parts.state.strategy
        strategy.works.append((NeverDone(), None))
        strategy.gathers["head"] = [NeverDone()]
        strategy.buckets[0].flat.fill_(1e9)
        if world.rank == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    step = graphed(parts, Fake(fails))
    equal = train(parts, step) == expected and same(weights(parts), weights(eager))
    return {"choice": step.choice, "equal": equal}


def main(dataset: str, results: str) -> None:
    world = init_world(TrainConfig(device="cpu", dataset=dataset))
    found = {name: check_replays(dataset, world, keys) for name, keys in CASES.items()}
    found["failure"] = check_failure(dataset, world, OVERLAP)
    everyone = gather_objects(found, world)
    if world.is_main:
        Path(results).write_text(json.dumps(everyone))
    dist.barrier()
    end_process(world, 0)


main(*sys.argv[1:])
