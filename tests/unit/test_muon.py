"""Muon on a CPU: what is orthogonalized, against singular values and torch's own Muon, and what an update
changes. tests/gpu/test_muon_kernels.py has its kernels, tests/runs/test_strategies.py whole runs."""

import functools

import pytest
import torch
from support.graphed_runs import build
from support.helpers import TINY, make_dataset
from support.muon_directions import assert_direction_of_float32, gradient_of_size
from support.updates import update

import model_builder
from model_config import model_config
from ops.orthogonalize import POLAR_EXPRESS, orthogonalize
from training.checkpoints.plan import checkpoint_bytes
from training.configuration.keys import TrainConfig
from training.optimization import muon
from training.optimization.optimizer import describe_optimizer
from training.strategies.owners import assign

NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5  # torch.optim.Muon's
SHAPES = [(64, 64), (96, 64), (64, 96), (300, 64), (64, 300), (512, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrices(shape, count=3, seed=0):
    """Gaussian ones, with singular values from 1 to 0.03, and of rank 1."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = [torch.randn(shape, generator=generator) for _ in range(count)]
    u, s, v = torch.linalg.svd(gaussian[1], full_matrices=False)
    gaussian[1] = 1e-4 * (u * torch.logspace(0, -1.5, len(s))) @ v
    return gaussian


def with_one_direction(shape, share, exponent):
    """Singular values that fall by a power of their place, but the first has that share of the norm."""
    u, s, v = torch.linalg.svd(matrices(shape, 2)[0], full_matrices=False)
    s = torch.arange(1.0, len(s) + 1) ** -exponent
    s *= (1 - share**2) ** 0.5 / s[1:].norm()
    s[0] = share
    return 1e-3 * (u * s) @ v


# --- the orthogonal factor ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_become_nearly_one_and_singular_vectors_stay(shape, dtype):
    for matrix in matrices(shape):
        (found,) = orthogonalize([matrix.to(dtype)]).float()
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        values = torch.linalg.svdvals(found)
        large = s / torch.linalg.vector_norm(s) > 0.002
        assert values.max() < 1.16 and (values[large.nonzero().max()]) > 0.84
        in_its_base = u.mT @ found @ v.mT  # diagonal, if the vectors are the same
        rest = in_its_base - torch.diag(in_its_base.diagonal())
        assert rest.square().sum() < (1e-4 if dtype == torch.float32 else 0.02) * len(s)
        assert (in_its_base.diagonal()[large] > 0.8).all()


def test_the_largest_possible_singular_value_begins_2_percent_below_1():
    """Else rounding could begin above 1, where the polynomials grow without end."""
    value = 1 / 1.02
    for a, b, c in POLAR_EXPRESS:
        value = a * value + b * value**3 + c * value**5
    (found,) = orthogonalize([torch.outer(torch.arange(1.0, 17), torch.arange(1.0, 25))])
    assert torch.linalg.svdvals(found)[0].item() == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_matrix_becomes_does_not_depend_on_its_batch_and_zeros_stay_zeros(shape):
    many = [*(matrix.bfloat16() for matrix in matrices(shape, 5)), torch.zeros(shape, dtype=torch.bfloat16)]
    together = orthogonalize(many)
    assert all(torch.equal(orthogonalize([one])[0], both) for one, both in zip(many, together, strict=True))
    assert not together[-1].any()


@pytest.mark.parametrize("share", [0.3, 0.6, 0.86, 0.95])
@pytest.mark.parametrize("shape", [(96, 256), (256, 96), (96, 96)], ids=str)
def test_one_direction_may_have_most_of_the_norm_as_in_gradients_of_a_new_model(shape, share):
    for exponent in (0.3, 0.7, 1.5):
        matrix = with_one_direction(shape, share, exponent)
        found, plain = orthogonalize([matrix.bfloat16()])[0].float(), orthogonalize([matrix])[0]
        assert torch.linalg.svdvals(found).max() < 1.3
        assert (found - plain).norm() < 0.2 * plain.norm()


# --- the update ---


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("muon") / "tokens")


def optimizer_of(dataset, **keys):
    """(Muon, all shards by name), with random gradients."""
    made = build(dataset, optimizer="muon", **keys)
    shards = {shard.name: shard for shard in made.state.strategy.shards}
    generator = torch.Generator().manual_seed(3)
    for shard in shards.values():
        shard.local.grad = torch.randn(shard.local.shape, generator=generator).to(shard.local.dtype)
    return made.state.optimizer, shards


def test_with_torch_s_coefficients_it_is_torch_s_muon(dataset, monkeypatch):
    """Torch computes in bf16, where 0.4 % between both norms, the only difference, becomes 1 to 2 %."""
    theirs_form = functools.partial(orthogonalize, coefficients=NEWTON_SCHULZ, margin=1.0)
    monkeypatch.setattr(muon, "orthogonalize", theirs_form)
    ours, shards = optimizer_of(dataset, dtype="bfloat16", learning_rate=0.02, weight_decay=0.1)
    mine = {name: s for name, s in shards.items() if muon.is_muons(name, s.parameter.shape)}
    config = TrainConfig(**TINY).model_config()

    def parts_of(name, whole):
        return [part.clone() for part in muon.matrices_of(name, whole.detach(), config)]

    before = {name: parts_of(name, shard.local) for name, shard in mine.items()}
    copies = {name: [torch.nn.Parameter(part.clone()) for part in parts] for name, parts in before.items()}
    all_copies = [copy for parts in copies.values() for copy in parts]
    keys = dict(lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    theirs, generator = torch.optim.Muon(all_copies, **keys), torch.Generator().manual_seed(7)
    for _ in range(3):
        for name, shard in mine.items():
            shard.local.grad = torch.randn(shard.local.shape, generator=generator)
            for copy, part in zip(copies[name], parts_of(name, shard.local.grad), strict=True):
                copy.grad = part
        update(ours, 0.02)
        theirs.step()
    for name, shard in mine.items():
        for was, now, copy in zip(before[name], parts_of(name, shard.local), copies[name], strict=True):
            assert (now - copy.detach()).norm() < 0.02 * (copy.detach() - was).norm(), name


def test_an_update_has_adamw_s_rms_and_adamw_updates_the_rest(dataset):
    optimizer, shards = optimizer_of(dataset, learning_rate=0.01, weight_decay=0.0)
    before = {name: shard.local.detach().clone() for name, shard in shards.items()}
    update(optimizer, 0.01)
    for name, shard in shards.items():
        moved = (shard.local.detach() - before[name]).square().mean().sqrt() / 0.01
        if muon.is_muons(name, shard.parameter.shape):
            assert 0.17 < moved < 0.22, name
            assert set(optimizer.kept(shard)) == {"step", "momentum"}
        else:
            assert float(moved) == pytest.approx(1, rel=1e-3), name  # Adam's first update
            assert set(optimizer.kept(shard)) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.kept(shards["embed.weight"])["exp_avg"].any()


def test_q_k_v_gate_and_up_are_matrices_of_their_own():
    sizes = dict(n_layer=1, n_head=4, n_kv_head=2, n_embd=32, head_dim=16, d_ff=48, vocab_size=65)
    config = model_config("qwen3", **sizes)
    weights = model_builder.build_model(config).named_parameters()
    mine = {name: weight for name, weight in weights if muon.is_muons(name, weight.shape)}
    shapes = {
        name.removeprefix("blocks.0."): [tuple(part.shape) for part in muon.matrices_of(name, weight, config)]
        for name, weight in mine.items()
    }
    assert shapes == {
        "attn.qkv.weight": [(64, 32), (32, 32), (32, 32)],
        "attn.out.weight": [(32, 64)],
        "ffn.up.weight": [(48, 32), (48, 32)],
        "ffn.down.weight": [(32, 48)],
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rms", [1e3, 1e-7, 1e-9])
def test_gradients_of_any_size_have_the_direction_of_float32_s(dtype, rms):
    """Of 1e-7, most have no digit in float16."""
    assert_direction_of_float32(gradient_of_size(rms), dtype)


def test_a_skipped_update_leaves_every_bit_and_gradients_are_unscaled(dataset):
    optimizer, shards = optimizer_of(dataset)
    update(optimizer)

    def state():
        return [t.clone() for s in shards.values() for t in (s.local.detach(), *optimizer.kept(s).values())]

    before = state()
    for shard in shards.values():
        shard.local.grad[0] = torch.nan
    update(optimizer, found_inf=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))

    plain, scaled = optimizer_of(dataset), optimizer_of(dataset)
    for shard in scaled[1].values():
        shard.local.grad *= 1024
    update(plain[0])
    update(scaled[0], divisor=1024.0)
    name = "blocks.0.ffn.down.weight"
    assert torch.equal(plain[1][name].local, scaled[1][name].local)


def test_each_update_is_rounded_with_random_bits_of_its_own(dataset):
    keys = {"dtype": "bfloat16", "param_dtype": "bfloat16", "weight_rounding": "stochastic"}
    optimizer, _ = optimizer_of(dataset, **keys)
    for number in (1, 2, 3):
        update(optimizer)
        assert {int(optimizer.roundings[shard.name][0][1]) for shard in optimizer.muons} == {number}


# --- what is said and refused ---


def test_the_record_says_who_updates_what_and_muon_s_operations():
    keys = dict(n_layer=24, n_head=16, num_key_value_heads=8, n_embd=2048, d_ff=6144)
    config = TrainConfig(optimizer="muon", arch_preset="qwen3", **keys)
    model = model_builder.build_model(config.model_config())
    found = describe_optimizer(model, config)
    ours, matrices, vectors = found["param_groups"]
    assert found["type"].startswith("Muon on the matrices of blocks, AdamW")
    assert (ours["tensors"], ours["params"]) == (4 * 24, 24 * 2048 * (2 * (2048 + 1024) + 3 * 6144))
    assert ours["params"] + matrices["params"] + vectors["params"] == 1_830_395_904
    assert ours["orthogonalization_flops"] == pytest.approx(58.2e12, rel=1e-3)
    saved = 8 * 1_830_395_904 + 4 * 1_830_395_904 - 4 * ours["params"]
    assert checkpoint_bytes(1_830_395_904, config) == saved


def test_owners_have_equal_loads():
    costs = [7, 7, 5, 5, 5, 3, 3, 1] * 4
    for parts in (1, 2, 3, 8):
        owner = assign(costs, parts)
        loads = [sum(c for c, o in zip(costs, owner, strict=True) if o == rank) for rank in range(parts)]
        assert max(loads) <= 1.05 * sum(costs) / parts
