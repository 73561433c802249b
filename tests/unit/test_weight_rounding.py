"""weight_rounding='stochastic': the same bf16 weights for any division among ranks, right on average."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from support.graphed_runs import build
from support.helpers import TINY, make_dataset
from support.updates import update
from torch.testing._internal.distributed.fake_pg import FakeStore

import model_builder
from ops.quantization import adamw, random_bits
from training.configuration.keys import TrainConfig
from training.optimization.optimizer import build_optimizer, describe_optimizer
from training.process.world import World
from training.strategies.parallelize import parallelize
from training.strategies.strategy import Shard

STORED = {"dtype": "bfloat16", "param_dtype": "bfloat16", "adam_dtype": "bfloat16"}
STOCHASTIC = {**STORED, "weight_rounding": "stochastic"}
MOMENTS = {"bf16 moments": STOCHASTIC, "8-bit moments": {**STOCHASTIC, "adam_dtype": "8bit", "d_ff": 300}}
UPDATES = 5

# --- any number of ranks ---

SHAPE = {**TINY, "n_embd": 16, "d_ff": 40, "vocab_size": 65}  # rows that no number of ranks here divides
DIVISIONS = {  # name -> keys, ranks, ranks on a machine
    "ddp": ({}, 2, 2),
    "zero1": ({"use_zero1": True}, 2, 2),
    "zero1 on 3": ({"use_zero1": True}, 3, 3),
    "fsdp": ({"use_fsdp": True}, 2, 2),
    "fsdp on 3": ({"use_fsdp": True}, 3, 3),
    "fsdp on 11": ({"use_fsdp": True}, 11, 11),  # the last ones have no row of a vector
    "hybrid": ({"use_fsdp": True, "fsdp_sharding": "hybrid"}, 4, 2),
}


@contextlib.contextmanager
def rank_of(ranks: int, rank: int, on_a_machine: int):
    """One of several ranks; the other ones are imagined."""
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield World(rank, rank % on_a_machine, ranks, torch.device("cpu"), local_size=on_a_machine)
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def updated(world: World, **keys) -> list[tuple[Shard, list[torch.Tensor]]]:
    """(shard, its weight and moments after UPDATES), of one rank that is given its part of the gradients."""
    config = TrainConfig(**{**SHAPE, **keys})
    model = model_builder.build_model(config.model_config(), dtype=torch.bfloat16).init_weights("cpu", 0)
    strategy = parallelize(model, config, world)
    optimizer = build_optimizer(strategy.shards, config)
    for number in range(UPDATES):
        generator = torch.Generator().manual_seed(number)
        for shard in strategy.shards:
            whole = torch.randn(shard.parameter.shape, generator=generator).bfloat16().flatten()
            mine = whole[shard.start :][: shard.local.numel()]
            shard.local.grad = mine.view(shard.local.shape).clone()
        update(optimizer, config.learning_rate)
    return [(shard, [shard.local.detach(), *moments_of(optimizer, shard)]) for shard in strategy.shards]


def moments_of(optimizer, shard: Shard) -> list[torch.Tensor]:
    return [tensor for name, tensor in optimizer.kept(shard).items() if name != "step"]


@pytest.fixture(scope="module", params=MOMENTS)
def moments(request) -> dict[str, object]:
    return MOMENTS[request.param]


@pytest.fixture(scope="module")
def by_one_process(moments) -> list[tuple[Shard, list[torch.Tensor]]]:
    with rank_of(1, 0, 1) as world:
        return updated(world, **moments)


@pytest.mark.parametrize("name", DIVISIONS)
def test_every_division_among_ranks_makes_the_weights_of_one_process(moments, by_one_process, name):
    keys, ranks, on_a_machine = DIVISIONS[name]
    found = {shard.name: torch.zeros(len(shard.parameter), dtype=torch.int) for shard, _ in by_one_process}
    for rank in range(ranks):
        with rank_of(ranks, rank, on_a_machine) as world:
            parts = updated(world, **moments, **keys)
        for (shard, tensors), (whole, expected) in zip(parts, by_one_process, strict=True):
            assert shard.name == whole.name
            first = shard.start // whole.parameter.shape[1:].numel()
            mine = slice(first, first + len(shard.local))
            for ours, theirs in zip(tensors, expected, strict=True):
                assert torch.equal(ours, theirs[mine]), (shard.name, rank)
            found[shard.name][mine] += 1
    for name, times in found.items():
        assert times.min() == times.max() >= 1, f"{name}: not all elements were updated as often"


def test_the_chunks_of_a_tensor_do_not_matter(moments, by_one_process, monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK", 700)
    with rank_of(1, 0, 1) as world:
        for (shard, ours), (_, theirs) in zip(updated(world, **moments), by_one_process, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), shard.name


# --- random bits ---


def test_no_two_weights_moments_updates_or_seeds_share_their_bits():
    """All draw for the same numbers, of which rounding to nearest would make one alone."""
    local = torch.ones(2, 8, 8)

    def drawn(seed: int, updates: int) -> list[tuple]:
        shards = [Shard(f"w{i}", p, p) for i, p in enumerate(map(torch.nn.Parameter, local.bfloat16()))]
        config = TrainConfig(**STOCHASTIC, seed=seed, learning_rate=1e-3, weight_decay=0.0)
        optimizer, rows = build_optimizer(shards, config), []
        for _ in range(updates):
            for shard in shards:
                state = optimizer.kept(shard)
                shard.local.data.fill_(1.0)
                shard.local.grad = torch.full_like(shard.local, 1.04)  # moments between two bf16 numbers
                state["exp_avg"].fill_(1.0), state["exp_avg_sq"].fill_(1.0)
            update(optimizer, config.learning_rate)
            tensors = [[s.local, *moments_of(optimizer, s)] for s in shards]
            rows += [tuple((t == t.max()).flatten().tolist()) for of_one in tensors for t in of_one]
        return rows

    rows = [row for seed in (1, 2) for row in drawn(seed, 3)]
    assert len(rows) == 2 * 3 * 2 * 3
    assert all(0 < sum(row) < len(row) for row in rows)
    assert len(set(rows)) == len(rows)


def test_weights_draw_none_of_the_bits_of_gradients():
    gradients = random_bits.random_key(1, tensor=random_bits.WEIGHTS - 1)
    assert random_bits.weight_key(1, 0)[3] == gradients[3] + 1
    with pytest.raises(ValueError, match="tensor=.* is not from 0"):
        random_bits.weight_key(1, random_bits.WEIGHTS)


# --- right on average ---


def test_bf16_weights_learn_at_2e_5_where_rounding_to_nearest_stands_still(tmp_path):
    """The distance along the path that fp32 weights go, as a part of that path. The record says how."""
    dataset = make_dataset(tmp_path / "tokens", train_tokens=20_000)

    def moved(**keys) -> tuple[torch.Tensor, float]:
        parts = build(dataset, dtype="bfloat16", beta2=0.99, **keys)
        said = describe_optimizer(parts.state.strategy.module, parts.config)["weight_rounding"]
        assert said == keys.get("weight_rounding", "nearest")
        shards = [shard for shard in parts.state.strategy.shards if shard.is_matrix]
        before = [shard.local.detach().clone().float() for shard in shards]
        for _ in range(40):
            parts.step(*parts.loader.next(), 2e-5)
        pairs = zip(shards, before, strict=True)
        path = torch.cat([(shard.local.detach().float() - was).flatten() for shard, was in pairs])
        return path, (path != 0).float().mean().item()

    path, _ = moved()
    nearest, changed_by_nearest = moved(param_dtype="bfloat16")
    stochastic, changed = moved(param_dtype="bfloat16", weight_rounding="stochastic")
    shares = [(other @ path / (path @ path)).item() for other in (nearest, stochastic)]
    assert shares[0] < 0.5 and shares[1] == pytest.approx(1, abs=0.1)
    assert changed > 2 * changed_by_nearest
