"""When gradients travel and what a strategy holds, as rank 0 of two whose other rank is imagined."""

import contextlib
import gc
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from support.helpers import TINY, write_config
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import model_builder
from training.configuration.dtypes import DTYPES
from training.configuration.files_and_flags import load_config
from training.optimization.compile import compile_and_checkpoint
from training.optimization.optimizer import build_optimizer
from training.process import world as process_world
from training.process.world import World
from training.strategies import replicated as replicated_strategy
from training.strategies import zero1
from training.strategies.parallelize import parallelize
from training.strategies.replicated import Bucket

CPU = torch.device("cpu")
SHARDINGS = pytest.mark.parametrize("sharding", [[], ["--use_zero1=True"]], ids=["ddp", "zero1"])


@pytest.fixture
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield World(rank=0, local_rank=0, size=2, device=torch.device("cpu"), local_size=2)
    dist.destroy_process_group()


@pytest.fixture
def assemble(world, tmp_path):
    """assemble(*flags): (model, strategy, optimizer) as train.py puts them together."""
    keys = {**TINY, "n_layer": 3, "n_embd": 16, "vocab_size": 65, "batch_size": 2}
    path = write_config(tmp_path / "run.py", **keys)

    def assemble(*flags):
        config = load_config([str(path), *flags], world.size)
        model = model_builder.build_model(config.model_config(), dtype=DTYPES[config.dtype])
        model.init_weights("cpu", seed=0)
        compile_and_checkpoint(model, config)
        strategy = parallelize(model, config, world)
        return model, strategy, build_optimizer(strategy.shards, config)

    return assemble


def micro_step(strategy, last: bool) -> None:
    ids = torch.arange(2 * 32).view(2, 32) % 65
    strategy.micro_step(last)
    strategy.forward(ids, ids).backward()


def watch(model, strategy, monkeypatch) -> list[str]:
    """A list that fills with 'backward of X' and 'sends X' as they happen, X a part of the model."""
    events = []

    def part_of(tensor) -> str:
        at = tensor.untyped_storage().data_ptr()
        (bucket,) = (b for b in strategy.buckets if b.flat.untyped_storage().data_ptr() == at)
        first = next(iter(bucket.views))
        return ".".join(first.split(".")[:2]) if first.startswith("blocks") else first.split(".")[0]

    def recorded(communicate, gradients):
        def run(*tensors, **options):
            event = f"sends {part_of(tensors[gradients])}"
            if event not in events:  # ZeRO-1 sends matrices, then vectors
                events.append(event)
            return communicate(*tensors, **options)

        return run

    monkeypatch.setattr(dist, "all_reduce", recorded(dist.all_reduce, 0))
    monkeypatch.setattr(zero1, "reduce_scatter", recorded(zero1.reduce_scatter, 1))
    parts = {f"blocks.{i}": block for i, block in enumerate(model.blocks)} | {"head": model.head}
    for name, module in parts.items():
        module.register_full_backward_pre_hook(lambda *_, name=name: events.append(f"backward of {name}"))
    return events


@pytest.mark.parametrize("recompute", ["none", "full"])
@SHARDINGS
def test_gradients_travel_beside_the_backward_of_the_blocks_below(assemble, monkeypatch, sharding, recompute):
    model, strategy, _ = assemble(*sharding, f"--activation_checkpointing={recompute}")
    events = watch(model, strategy, monkeypatch)
    parts = ["head", "blocks.2", "blocks.1", "blocks.0"]
    for _ in range(2):
        micro_step(strategy, last=False)
    assert events == 2 * [f"backward of {part}" for part in parts]  # nothing is sent before the last one
    events.clear()
    micro_step(strategy, last=True)
    assert events == [
        *("backward of head", "backward of blocks.2", "sends head", "sends blocks.2"),
        *("backward of blocks.1", "sends blocks.1", "backward of blocks.0", "sends blocks.0"),
    ]
    events.clear()
    strategy.reduce_gradients(torch.zeros(()))
    assert events == ["sends embed"]


def test_a_few_messages_hold_what_travels_beside_the_backward():
    """The first is the longest, so that most of the backward is left to hide it; the last is one block."""
    head, block = nn.Linear(2048, 1000), nn.Linear(2048, 256)
    modules = {"head": head} | {f"blocks.{i}": block for i in reversed(range(24))}
    buckets = {name: Bucket(dict(module.named_parameters()), 2, CPU) for name, module in modules.items()}
    messages = replicated_strategy.in_messages(buckets)
    assert [name for message in messages for name in message] == list(modules)
    lengths = [sum(len(buckets[name].flat) for name in message) for message in messages]
    for i, length in enumerate(lengths[:-1]):
        assert sum(lengths[i + 1 :]) / 2 <= length <= sum(lengths) / 2
    assert len(messages) <= 9
    assert messages[-1] == ["blocks.0"]


class Sending:
    """What a communication in progress is; says when somebody waits for it."""

    def __init__(self, events: list[str], what: str):
        self.events, self.what = events, what

    def wait(self) -> None:
        if f"waits for {self.what}" not in self.events[-1:]:  # each matrix is sent by itself
            self.events.append(f"waits for {self.what}")


def test_only_nccl_gets_collectives_together(world, monkeypatch):
    """With several coalesced all-gathers under way, gloo ends a process by a segmentation fault."""
    started, together = [], []

    @contextlib.contextmanager
    def coalescing(async_ops):
        yield together.append(len(started))

    monkeypatch.setattr(dist, "_coalescing_manager", coalescing)
    for backend, found in (("gloo", [True, True]), ("nccl", [False, False])):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        started.clear()
        process_world.start_together(
            lambda tensor, async_op=False: started.append(async_op), [(torch.ones(1),)] * 2, []
        )
        assert started == found
    assert together == [0]  # for NCCL, and before the first of them


@SHARDINGS
def test_norms_are_computed_while_the_embedding_s_gradient_travels(assemble, monkeypatch, sharding):
    """It is complete only at the end of the backward, which can hide nothing more."""
    model, strategy, _ = assemble(*sharding)
    micro_step(strategy, last=True)
    events = watch(model, strategy, monkeypatch)
    (module,) = {replicated_strategy, zero1} & {sys.modules[type(strategy).__module__]}
    monkeypatch.setattr(module, "norms", lambda grads, **_: events.append("norms") or torch.ones(len(grads)))
    for where, name in ((dist, "all_reduce"), (zero1, "reduce_scatter")):
        monkeypatch.setattr(where, name, lambda *_, **__: Sending(events, "the embedding"))
    strategy.works.clear()
    strategy.reduce_gradients(torch.zeros(()))
    assert events == ["norms", "waits for the embedding", "norms"]


def storages() -> dict[int, int]:
    """Address -> bytes of the memory of every tensor alive; what torch.compile traced with has none."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    real = (t for t in alive if t.device.type == "cpu" and not isinstance(t, (FakeTensor, FunctionalTensor)))
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in real}


@pytest.mark.parametrize("compute", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_zero1_holds_one_copy_of_the_gradients_and_half_of_the_optimizer_s_state(assemble, compute):
    """Also between micro-steps and after the reduction, when a copy would be there if one were made."""
    before = storages()
    flags = ["--use_zero1=True", "--n_embd=64", f"--dtype={compute}", "--vocab_size=66"]
    model, strategy, optimizer = assemble(*flags)  # which holds the moments
    parameters = model.count_parameters()["total"]
    working = {"float32": 4, "bfloat16": 2}[compute]
    expected = (working + 4 + 3 * 4 / 2) * parameters  # whole, whole; half of weights and two moments

    def held() -> int:
        return sum(size for at, size in storages().items() if at not in before)

    slack = 0.03 * parameters * 4  # vectors in full, rotary angles
    assert abs(held() - expected) < slack
    micro_step(strategy, last=False)
    assert abs(held() - expected) < slack
    micro_step(strategy, last=True)
    strategy.reduce_gradients(torch.zeros(()))
    assert abs(held() - expected) < slack
    buckets = [bucket.flat.untyped_storage().data_ptr() for bucket in strategy.buckets]
    assert all(s.local.grad.untyped_storage().data_ptr() in buckets for s in strategy.shards)


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@SHARDINGS
def test_gradients_sent_in_bf16_are_the_updates_as_they_arrive(assemble, sharding, weights):
    """Nothing is copied back to the sums, and the copies that were sent are gone before the next forward."""
    flags = [*sharding, "--dtype=bfloat16", "--reduce_dtype=bfloat16", f"--param_dtype={weights}"]
    _, strategy, _ = assemble(*flags)
    micro_step(strategy, last=False)
    before = storages()
    micro_step(strategy, last=True)
    strategy.reduce_gradients(torch.zeros(()))
    sent = {tensor.untyped_storage().data_ptr() for copy in strategy.sent.values() for tensor in copy.tensors}
    assert sent.isdisjoint(before)
    for shard in strategy.shards:
        expected = strategy._mine(shard, strategy.views[shard.name]).bfloat16()
        assert torch.equal(shard.grad.bfloat16(), expected) and expected.any()
        # a CPU's update wants gradients in the weights' dtype; a GPU's takes any
        assert shard.grad.dtype == shard.local.dtype
        assert (shard.grad.untyped_storage().data_ptr() in sent) == (weights == "bfloat16")
    # of this rank's rows, with ZeRO-1: the other one adds nothing
    squares = sum(shard.grad.double().square().sum() for shard in strategy.shards)
    assert strategy.loss_and_norm()[1].item() == pytest.approx(squares.sqrt().item(), rel=1e-6)
    del expected
    strategy.clear_gradients()
    left = sum(size for at, size in storages().items() if at not in before)
    assert left < 100 * len(strategy.shards) and not strategy.has_gradients()  # the loss and the norms


@SHARDINGS
def test_a_gradient_that_is_left_anywhere_is_seen(assemble, sharding):
    """A capture that leaves one would add it to the next iteration's."""
    flags = ["--dtype=bfloat16", "--param_dtype=bfloat16", "--gradient_dtype=bfloat16"]
    _, strategy, _ = assemble(*sharding, *flags)
    tensors = [tensor for bucket in strategy.buckets for tensor in bucket.tensors]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16, torch.float32}, "of matrices, of vectors"
    for tensor in tensors:
        assert not strategy.has_gradients()
        tensor[0] = 1e-9
        assert strategy.has_gradients()
        strategy.clear_gradients()
