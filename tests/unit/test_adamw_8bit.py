"""adam_dtype='8bit' is torchao's AdamW8bit, also after a resume; gradient sums in bf16."""

import itertools
import math

import pytest
import torch
from support.checkpoint_parts import checkpoint_tensors
from support.graphed_runs import build
from support.helpers import TINY, make_dataset, write_config
from support.updates import empty_moment

from ops.quantization import adamw_8bit
from ops.quantization.adamw import Scalars, plain_adamw
from ops.quantization.adamw_8bit import dequantize, quantize
from training.checkpoints.plan import checkpoint_bytes
from training.configuration.keys import TrainConfig
from training.memory.estimate import estimate_memory
from training.optimization.optimizer import build_optimizer
from training.strategies.strategy import Shard

RATE, EPS, DECAY = 1e-3, 1e-8, 0.1


def scalars(step: int, betas=(0.9, 0.95), scale=1.0, found_inf=0.0) -> Scalars:
    corrections = 1 - betas[0] ** step, math.sqrt(1 - betas[1] ** step)
    return Scalars(*(torch.tensor(float(x)) for x in (RATE, scale, found_inf, step, *corrections)))


def gradients(shape, count: int):
    """Some directions that last, and noise; rows of many sizes."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, generator=generator) * torch.logspace(-9, 0, shape[0])[:, None]
    return [mean + 3 * mean * torch.randn(shape, generator=generator) for _ in range(count)]


# --- torchao, the oracle ---


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_has_torchaos_code(signed):
    """The numbers of the map, those around each threshold, and many in between."""
    torchao = pytest.importorskip("torchao.optim.quant_utils")
    numbers = torch.tensor(torchao.create_dynamic_map(signed=signed))
    assert torch.equal(adamw_8bit.number_map(signed), numbers)
    limits = adamw_8bit.thresholds(signed)
    near = [limits]
    for end in (-2.0, 2.0):
        near.append(limits)
        for _ in range(4):
            near.append(torch.nextafter(near[-1], torch.tensor(end)))
    between = torch.linspace(-1.0 if signed else 0.0, 1, 20_001), torch.logspace(-9, 0, 20_001)
    x = torch.cat([*near, numbers, *between])
    codes = torch.bucketize(x, limits, right=True).to(torch.uint8)
    assert torch.equal(codes, torchao.quantize_8bit_with_qmap(x, numbers))


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_have_torchaos_codes_and_scales(signed):
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    x = torch.randn(24, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-14, 2, 24)[:, None]
    x = x if signed else x.square()
    x[3] = 0
    theirs = subclass.OptimState8bit.zeros(x.shape, signed)
    theirs.copy_(x)
    ours = quantize(x, signed)
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scales.flatten(), theirs.scale)
    known = theirs.dequantize()
    if not signed:  # code 0 stands for the least number above 0
        known = torch.where(ours.codes == 0, theirs.qmap[1] * ours.scales.repeat_interleave(256, 1), known)
    assert torch.equal(dequantize(ours, signed), known)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_fifty_updates_are_torchaos(betas):
    """The first one, which starts from zeros, bit for bit; the others but for rounding in fp32. No gradient
    is so small that its square has code 0, which is 0 for torchao and makes its updates large."""
    adam = pytest.importorskip("torchao.optim.adam")
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    shape, generator = (20, 512), torch.Generator().manual_seed(2)
    ours = torch.randn(shape, generator=generator) * 0.02
    theirs, start = ours.clone(), ours.clone()
    mean, square = empty_moment(ours), empty_moment(ours)
    their_mean, their_square = (subclass.OptimState8bit.zeros(shape, signed) for signed in (True, False))
    sizes = torch.logspace(-5, 0, shape[0])[:, None]
    for step in range(1, 51):
        noise = torch.randn(shape, generator=generator)
        gradient = sizes * (noise + noise.sign())
        plain_adamw(ours, gradient, mean, square, None, scalars(step, betas), betas, EPS, DECAY)
        about = torch.tensor(RATE), *betas, DECAY, EPS, True, False
        number = torch.tensor(float(step))
        adam.single_param_adam(theirs, gradient, number, their_mean, their_square, None, *about)
        for moment, wanted in ((mean, their_mean), (square, their_square)):
            rounding = 0.0 if step == 1 else 1e-6
            assert (moment.codes != wanted.codes).float().mean() <= (0 if step == 1 else 1e-3), step
            assert (moment.scales.flatten() / wanted.scale - 1).abs().max() <= rounding, step
    assert (ours - theirs).norm() <= 3e-4 * (theirs - start).norm()  # a few codes are next to theirs


# --- the update ---


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("outlier", [1e3, 1e4, 1e6])
def test_an_outlier_column_leaves_its_neighbors_updates_bounded(outlier, betas):
    """Also where a checkpoint of earlier versions has squares of code 0, of whatever mean."""
    shape, generator = (4, 300), torch.Generator().manual_seed(3)
    weight = torch.zeros(shape)
    mean, square = empty_moment(weight), empty_moment(weight)
    largest = 0.0
    for step in range(1, 61):
        gradient = torch.randn(shape, generator=generator) * (torch.rand(4, 1, generator=generator) < 0.5)
        gradient[:, 100:200] *= step < 30  # then they have none, and their means decay
        gradient[:, 7] *= outlier
        before = weight.clone()
        plain_adamw(weight, gradient, mean, square, None, scalars(step, betas), betas, EPS, 0.0)
        largest = max(largest, (weight - before).abs().max().item())
        if step == 20:
            square.codes[square.codes == 1] = 0
    assert 0.5 * RATE < largest < 4 * RATE, largest / RATE


@pytest.mark.parametrize("columns", [512, 300])
def test_a_refused_update_changes_no_bit_and_a_divisor_divides(columns):
    shape, about = (8, columns), ((0.9, 0.95), EPS, DECAY)
    first, second, bad = (torch.full(shape, 0.5) for _ in range(3))
    for weight, divisor in ((first, 1.0), (second, 4.0), (bad, 1.0)):
        moments = empty_moment(weight), empty_moment(weight)
        copy = torch.zeros(shape, dtype=torch.bfloat16)
        for step, gradient in enumerate(gradients(shape, 3), start=1):
            plain_adamw(weight, divisor * gradient, *moments, copy, scalars(step, scale=divisor), *about)
            if weight is bad:
                changed = (weight, *moments[0], *moments[1], copy)
                kept = [tensor.clone() for tensor in changed]
                refused = scalars(step + 1, found_inf=1.0)
                plain_adamw(weight, gradient * math.nan, *moments, copy, refused, *about)
                assert all(map(torch.equal, changed, kept))
        assert torch.equal(copy, weight.bfloat16())
    assert torch.equal(first, second) and torch.equal(first, bad) and (first != 0.5).all()


def test_vectors_and_matrices_below_4096_numbers_keep_moments_in_fp32():
    shapes = {(64, 64): torch.uint8, (1, 5000): torch.uint8, (63, 64): torch.float32, (5000,): torch.float32}
    shards = [Shard(str(s), p, p) for s, p in ((s, torch.nn.Parameter(torch.zeros(s))) for s in shapes)]
    optimizer = build_optimizer(shards, TrainConfig(device="cpu", adam_dtype="8bit"))
    for shard, dtype in zip(shards, shapes.values(), strict=True):
        state = optimizer.kept(shard)
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype, shard.name
        assert ("exp_avg_scale" in state) == (dtype == torch.uint8)


# --- runs ---

SIZES = {"n_embd": 64, "d_ff": 300, "n_head": 4, "num_key_value_heads": 2}  # rows of 64 and of 300
BF16 = {"dtype": "bfloat16", "param_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("adamw_8bit") / "tokens", train_tokens=20_000)


def test_a_run_with_sums_in_bf16_learns_as_with_all_in_fp32(dataset):
    """tests/runs/test_strategies.py has those in fp32 and stochastic rounding."""
    losses = []
    for other in ({}, {**BF16, "gradient_dtype": "bfloat16", "adam_dtype": "8bit"}):
        parts = build(dataset, **SIZES, gradient_accumulation_steps=2, **other)
        losses.append([parts.step(*parts.loader.next(), 1e-2).loss.item() for _ in range(12)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[1][-1] < losses[1][0] - 0.5


def test_sums_in_bf16_are_the_optimizers_gradients(dataset):
    """No copy of a matrix's; vectors, which autograd adds up, are summed in fp32."""
    parts = build(dataset, **SIZES, **BF16, gradient_dtype="bfloat16")
    parts.step(*parts.loader.next(), 1e-2)
    strategy = parts.state.strategy
    assert not strategy.has_gradients()
    strategy.reduce_gradients(torch.zeros(()))
    for shard in strategy.shards:
        view = strategy.views[shard.name]
        assert (shard.grad.data_ptr() == view.data_ptr()) == shard.is_matrix
        assert view.dtype == (torch.bfloat16 if shard.is_matrix else torch.float32)


def test_a_checkpoint_is_as_large_as_told_and_refuses_moments_of_another_kind(dataset, tmp_path, run, capsys):
    """That a resume goes on bit for bit is in tests/runs/test_strategies.py."""
    config = {**TINY, **SIZES, "dataset": str(dataset), "max_iters": 2, "adam_dtype": "8bit"}
    command = write_config(tmp_path / "run.py", **config), f"--out_dir={tmp_path / 'out'}"
    assert run(*command) == 0
    resume = *command, "--init_from=resume", "--adam_dtype=float32"
    assert run(*resume) == 2
    error = capsys.readouterr().err
    assert "adam_dtype='8bit', but this run has adam_dtype='float32'" in error
    assert "go on with --adam_dtype=8bit" in error
    assert run(*resume, "--eval_only=True") == 0  # an evaluation needs no moments
    saved = tmp_path / "out" / "checkpoints" / "step-00000002"
    tensors = checkpoint_tensors(saved)
    assert tensors["optimizer.blocks.0.ffn.down.weight.exp_avg"].dtype == torch.uint8
    assert tensors["optimizer.blocks.0.ffn.down.weight.exp_avg_scale"].shape == (64, 2)
    size = sum(f.stat().st_size for f in saved.glob("*.safetensors"))
    total = sum(t.numel() for name, t in tensors.items() if name.startswith("model."))
    assert size == pytest.approx(checkpoint_bytes(total, TrainConfig(**config)), rel=0.25)  # rows of 64


def test_the_estimate_counts_what_is_allocated(dataset):
    keys = {**BF16, "n_embd": 256, "d_ff": 512, "vocab_size": 512}
    for adam, sums in itertools.product(("float32", "8bit"), ("float32", "bfloat16")):
        parts = build(dataset, **keys, adam_dtype=adam, gradient_dtype=sums)
        strategy, optimizer = parts.state.strategy, parts.state.optimizer
        moments = [t for s in strategy.shards for name, t in optimizer.kept(s).items() if name != "step"]
        items = estimate_memory(parts.config, 1)
        held = sum(t.nbytes for t in moments) / 2**30
        assert items[f"Adam moments ({adam})"] == pytest.approx(held, rel=0.03)
        parts.step(*parts.loader.next(), 1e-2)
        assert {s.local.grad for s in strategy.shards} == {None}  # rounded copies are the update's alone
        held = sum(t.nbytes for bucket in strategy.buckets for t in bucket.tensors) / 2**30
        assert items[f"gradient sums ({sums})"] == pytest.approx(held, rel=0.03)
