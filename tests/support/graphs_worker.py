"""Run under torchrun, two processes: what the gate of CUDA Graphs does with sharded runs. With a fake of CUDA
for test_sharded_captures.py; with two GPUs, for test_captured_sharding.py, a capture that fails.

graphs_worker.py DATASET RESULTS.json cpu|cuda
"""

import json
import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[i]) for i in (2, 1))  # the project, and tests/

import torch
import torch.distributed as dist
from support.graphed_runs import ON_GPU, Fake, build, captured, graphed, same, train, weights
from torch.distributed.tensor import DTensor

from common.errors import RunError
from training.configuration.keys import TrainConfig
from training.evaluation import evaluate
from training.process.exit_status import end_process
from training.process.world import World, gather_objects, init_world
from training.strategies.fsdp import Fsdp

ZERO1 = {"use_zero1": True, "gradient_accumulation_steps": 2, "vocab_size": 65}  # rows that 2 does not divide
FP8 = {"vocab_size": 64, "dtype": "bfloat16", "low_precision": "fp8_tensorwise"}
FSDP = {**ZERO1, "use_zero1": False, "use_fsdp": True}
CASES = {
    "zero1": ZERO1,
    "zero1 fp8": {**ZERO1, **FP8},
    "fsdp": FSDP,
    "fsdp resharded": {**FSDP, "reshard_after_forward": True},
    "fsdp fp8": {**FSDP, **FP8},
}


class NeverDone:
    """A transfer that a capture recorded, outside of it: it does not run, so a wait for it fails."""

    def wait(self):
        raise RuntimeError("waited for what was only recorded")


def check_replays(dataset: str, world: World, keys: dict) -> dict:
    """An eager run, and one that is captured, with evaluations and an iteration of another shape between."""
    eager, parts = build(dataset, world, **keys), build(dataset, world, **keys)
    torch.manual_seed(7)
    states: list[tuple] = []  # what Python knows, before and after every capture and replay

    def noted(run, fake):
        states.append(known(parts.state.strategy))

        def replay():
            states.append(known(parts.state.strategy))
            packed = run()
            states.append(known(parts.state.strategy))
            return packed

        return replay

    step = graphed(parts, Fake(noted))
    found = [run_with_interruptions(each, run) for each, run in ((eager, eager.step), (parts, step))]
    equal = found[0] == found[1] and same(weights(parts), weights(eager))
    return {"choice": step.choice, "equal": equal, "states": sorted(set(states)), "replays": len(states) // 2}


def known(strategy) -> tuple:
    """(communication that is under way, parameters that are gathered)"""
    parameters = list(strategy.module.parameters())
    gathered = [not isinstance(p, DTensor) for p in parameters] if isinstance(strategy, Fsdp) else []
    return len(getattr(strategy, "works", ())), sum(gathered)


def run_with_interruptions(parts, step) -> list:
    world, results = parts.state.world, train(parts, step, range(12))
    results.append(evaluate(parts.state.strategy.module, parts.windows, parts.config, world))
    results += train(parts, step, range(12, 14))
    x, y = parts.loader.next()
    result = step(x[:, :2].contiguous(), y[:, :2].contiguous(), 1e-3)
    results.append((result.loss.item(), result.grad_norm.item()))
    return results + train(parts, step, range(14, 18))


def check_failure(dataset: str, world: World, keys: dict) -> dict:
    """A capture that fails on rank 1 alone, in the middle of an iteration."""
    eager, parts = build(dataset, world, **keys), build(dataset, world, **keys)
    expected = train(eager, iterations=range(14))

    def fails(run, fake):
        strategy = parts.state.strategy
        strategy.works.append(NeverDone())
        strategy.buckets[0].flat.fill_(1e9)
        if world.rank == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    step = graphed(parts, Fake(fails))
    equal = train(parts, step, range(14)) == expected and same(weights(parts), weights(eager))
    return {"choice": step.choice, "equal": equal}


def check_broken_fsdp(dataset: str, world: World) -> str:
    """What ends a run with FSDP whose capture breaks off on rank 1, in the middle of an iteration."""
    parts = build(dataset, world, **FSDP)

    def breaks_off(run, fake):
        if world.rank == 1:
            parts.state.strategy.micro_step(last=False)
            raise RuntimeError("CUDA out of memory")
        return run

    try:
        train(parts, graphed(parts, Fake(breaks_off)), range(12))
    except RunError as error:
        return str(error)
    return "the run went on"


def check_failure_on_gpus(dataset: str, world: World) -> dict:
    """The same as check_failure with a real capture, in which NCCL has sent gradients and sends weights."""
    keys = {**ON_GPU, **ZERO1}
    eager, parts = build(dataset, world, **keys), build(dataset, world, **keys)
    expected = train(eager, iterations=range(14))

    def fails(*arguments):
        result = parts.step(*arguments)
        if world.rank == 1 and torch.cuda.is_current_stream_capturing():
            raise ValueError("not while capturing")
        return result

    step = captured(parts, fails)
    equal = train(parts, step, range(14)) == expected and same(weights(parts), weights(eager))
    step.close()
    return {"choice": step.choice, "equal": equal}


def main(dataset: str, results: str, device: str) -> None:
    world = init_world(TrainConfig(device=device, dataset=dataset, out_dir=str(Path(results).parent)))
    if device == "cuda":
        found = {"failure": check_failure_on_gpus(dataset, world)}
    else:
        found = {name: check_replays(dataset, world, keys) for name, keys in CASES.items()}
        found["failure"] = check_failure(dataset, world, ZERO1)
        found["broken fsdp"] = check_broken_fsdp(dataset, world)
    everyone = gather_objects(found, world)
    if world.is_main:
        Path(results).write_text(json.dumps(everyone))
    dist.barrier()
    end_process(world, 0)


main(*sys.argv[1:])
