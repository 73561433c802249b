"""CUDA Graphs with ZeRO-1 and FSDP, on a CPU: two gloo processes, and a fake in place of CUDA.
tests/gpu/test_captured_sharding.py has the same with real captures."""

import pytest
import torch
from support.graphed_runs import Fake, build, graphed, same, train, weights
from support.helpers import TINY, make_dataset, write_config
from support.ranks import on_ranks
from torch.distributed.tensor import DTensor

from common.errors import RunError
from training.configuration.files_and_flags import load_config
from training.evaluation import evaluate
from training.process.world import World
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


def of_a_rank(world: World, config: str) -> dict:
    dataset = load_config([config], world.size).dataset
    found: dict = {name: check_replays(dataset, world, keys) for name, keys in CASES.items()}
    failure = check_failure(dataset, world, ZERO1)
    return found | {"failure": failure, "broken fsdp": check_broken_fsdp(dataset, world)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("captures")
    dataset = make_dataset(folder / "tokens", train_tokens=100_000)
    config = write_config(folder / "run.py", **TINY, dataset=dataset)
    return on_ranks(2, "runs.test_sharded_captures:of_a_rank", config)


@pytest.mark.parametrize("case", CASES)
def test_the_gate_compares_each_ranks_shard_and_the_run_is_the_eager_one(ranks, case):
    """With an evaluation and an iteration of another shape between the replays, after which, too, nothing is
    on its way and no weight is gathered."""
    for rank in ranks:
        found = rank[case]
        assert found["choice"] == {"asked": "CUDA Graph", "used": "CUDA Graph", "reason": None}
        assert found["equal"] and found["replays"] > 5 and found["states"] == [[0, 0]]


def test_nothing_waits_for_what_a_failed_capture_has_sent(ranks):
    for rank in ranks:
        found = rank["failure"]
        assert found["equal"] and found["choice"]["used"] == "eager step"
        assert found["choice"]["reason"].startswith("rank 1: RuntimeError: operation not permitted")


def test_fsdp_goes_on_on_no_rank_if_a_capture_broke_off_on_one(ranks):
    for rank in ranks:
        assert rank["broken fsdp"] == (
            "CUDA Graph: the capture broke off (rank 1: RuntimeError: CUDA out of memory), and FSDP cannot "
            "go on after that; start again with --use_cuda_graphs=False"
        )
