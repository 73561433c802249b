"""Which rank writes which part of a checkpoint: rank 0 decides, at a cost that a thousand ranks can pay."""

import functools
import hashlib
import math
import os
import pickle
import time
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.helpers import ROOT

import model_builder
from common.errors import RunError
from training.checkpoints import staging
from training.checkpoints.staging import divide, plan_parts
from training.checkpoints.tensor_files import Part
from training.configuration.files_and_flags import load_config
from training.process.world import World

pytestmark = pytest.mark.saving

KINDS = ("ddp", "zero1", "fsdp", "hybrid")
# (strategy, ranks) -> the beginning of the hash of the plans that earlier versions made on every rank
PLANS = {
    ("ddp", 1): "95efce17728dbe1b",
    ("ddp", 2): "490f646a29ba0181",
    ("ddp", 4): "1d2264ed8916ec67",
    ("ddp", 8): "f01af0a02a064290",
    ("zero1", 1): "95efce17728dbe1b",
    ("zero1", 2): "6005765d0a6a057a",
    ("zero1", 4): "5074ebac6d0f280e",
    ("zero1", 8): "d52bf8d572b90f5d",
    ("fsdp", 1): "95efce17728dbe1b",
    ("fsdp", 2): "e2b4ba0ec9562b41",
    ("fsdp", 4): "d544dc9b8f9b0941",
    ("fsdp", 8): "844cdc68ac41ba91",
    ("hybrid", 1): "f449eb01a95faa47",
    ("hybrid", 2): "9d4364d31b4c6cae",
    ("hybrid", 4): "d544dc9b8f9b0941",
    ("hybrid", 8): "e299d8da2f7f7f5b",
}


@functools.cache
def parameters() -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights of a model of 1.8e9."""
    config = load_config([str(ROOT / "config" / "full_qwen3_1.8b_b200_optimal.py")])
    model = model_builder.build_model(config.model_config())
    return [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]


def parts_of(kind: str, rank: int, ranks: int) -> list[Part]:
    """What a rank holds under a strategy; hybrid: FSDP in groups of four."""
    parts = []
    for name, shape in parameters():
        shares = {"ddp": 1, "zero1": ranks if len(shape) > 1 else 1, "fsdp": ranks, "hybrid": 4}[kind]
        rows = math.ceil(shape[0] / shares)
        start = min(rank % shares * rows, shape[0])
        shape = (min(rows, shape[0] - start), *shape[1:])
        at = (start, *(0 for _ in shape[1:]))
        names = f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"
        parts += [Part(each, at, shape, torch.float32) for each in names]
        parts.append(Part(f"optimizer.{name}.step", (), (), torch.float32))
    return [*parts, Part(f"rng.{rank}.cpu", (0,), (5056,), torch.uint8)]


def sent_by(monkeypatch, parts: list[Part]) -> np.ndarray:
    """What a rank that holds these sends to rank 0."""
    sent: list[np.ndarray] = []
    with monkeypatch.context() as patch:
        patch.setattr(staging, "divide_on_main", lambda *args: sent.append(args[-1]) or ([], 0))
        plan_parts(parts, World(1, 1, 2, torch.device("cpu")), None)
    return sent[0]


def plans_of(monkeypatch, held: list[list[Part]]) -> list[tuple[list[Part], int]]:
    """plan_parts() of each rank, where these are the ranks; they reach each other without processes."""
    shares = divide([sent_by(monkeypatch, parts) for parts in held])
    worlds = [World(rank, rank, len(held), torch.device("cpu")) for rank in range(len(held))]
    with monkeypatch.context() as patch:
        patch.setattr(staging, "divide_on_main", lambda world, *args: shares[world.rank])
        return [plan_parts(parts, world, None) for parts, world in zip(held, worlds, strict=True)]


@pytest.mark.parametrize(("kind", "ranks"), PLANS)
def test_the_plan_is_that_of_earlier_versions(monkeypatch, kind, ranks):
    found = plans_of(monkeypatch, [parts_of(kind, rank, ranks) for rank in range(ranks)])
    plans = [[(part.name, part.offsets, part.shape) for part in plan] for plan, _ in found]
    assert hashlib.sha256(repr(plans).encode()).hexdigest()[:16] == PLANS[kind, ranks]
    assert {size for _, size in found} == {sum(part.bytes for plan, _ in found for part in plan)}


def test_what_several_ranks_hold_is_written_once_and_divided_by_size(monkeypatch):
    sizes = {"a": 8, "b": 1, "c": 5, "d": 3, "e": 7}
    shared = [Part(name, (0,), (size,), torch.float32) for name, size in sizes.items()]
    own, empty = Part("rng.1.cpu", (0,), (20,), torch.uint8), Part("f", (9, 0), (0, 4), torch.float32)
    (first, size), (second, _) = plans_of(monkeypatch, [[*shared, empty], [*shared, own]])
    assert sorted(part.name for part in (*first, *second)) == [*sizes, own.name] and own in second
    assert sum(part.bytes for part in first) == 56 and sum(part.bytes for part in second) == 60
    assert size == 56 + 60


@pytest.mark.parametrize("kind", KINDS)
def test_256_ranks_cost_rank_0_little_memory_and_the_others_none(monkeypatch, kind):
    ranks = range(256)
    sent = [pickle.dumps(sent_by(monkeypatch, parts_of(kind, rank, len(ranks)))) for rank in ranks]
    assert max(map(len, sent)) < 20_000, "bytes that a rank sends"
    began = time.process_time()
    shares = divide([pickle.loads(each) for each in sent])
    assert time.process_time() - began < 5
    assert max(len(pickle.dumps(share)) for share in shares) < 20_000, "bytes that a rank gets"
    if kind == "fsdp":  # the most parts
        del shares
        tracemalloc.start()
        divide([pickle.loads(each) for each in sent])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 60e6


# --- real ranks ---

PARTS = [Part(f"part {number}", (0,), (number + 1,), torch.float32) for number in range(6)]


def plan_in_processes(tmp_path, prepare=lambda rank: None) -> list[object]:
    """What plan_parts(PARTS) gives or raises on each of two ranks that communicate by gloo."""
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)
                store = f"file://{tmp_path}/store"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
                prepare(rank)
                result: object = plan_parts(
                    PARTS, World(rank, rank, 2, torch.device("cpu")), dist.new_group()
                )
            except BaseException as error:
                result = error
            (tmp_path / str(rank)).write_bytes(pickle.dumps(result))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return [pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2)]


def test_each_rank_gets_its_part_of_the_plan(tmp_path):
    (first, size), (second, same) = plan_in_processes(tmp_path)
    names = [[int(part.name.split()[1]) for part in plan] for plan in (first, second)]
    assert names == [[5, 2, 1], [4, 3, 0]] and size == same == 4 * 21


def test_an_error_while_rank_0_plans_is_the_same_error_on_every_rank(tmp_path):
    def fail(held):
        raise MemoryError("no room for the plan")

    def prepare(rank):
        staging.divide = fail

    for error in plan_in_processes(tmp_path, prepare):
        assert isinstance(error, RunError)
        assert str(error) == (
            "rank 0 could not divide the work among the ranks: MemoryError: no room for the plan"
        )
