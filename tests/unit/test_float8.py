"""fp8 by one scale of a matrix: its numerics against torchao and fp32, in plain form."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import fake_norm
from support.all_recipes import use_recipe_in
from support.tensors import E4M3, E5M2, assert_requantized_as_each_alone, error, fp8_linear, random_bf16
from torch.utils.checkpoint import checkpoint

from model_builder import build_model
from model_config import model_config
from ops import float8
from ops.activation import Activation
from ops.cross_entropy import LinearCrossEntropy
from ops.feed_forward import feed_forward
from ops.swiglu import swiglu


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_magnitude_becomes_the_largest_fp8_number_and_zeros_stay_finite(dtype):
    x = random_bf16(32, 48, std=7.0)
    quantized = float8.quantize(x, dtype)
    assert quantized.rows.float().abs().max() == torch.finfo(dtype).max
    assert torch.equal(quantized.columns.float(), quantized.rows.float().t())
    assert error(quantized.rows.float() * quantized.inverse_scale, x) < (0.03 if dtype == E4M3 else 0.06)
    zeros = float8.quantize(torch.zeros_like(x), dtype)
    assert torch.isfinite(zeros.inverse_scale) and not zeros.rows.float().any()


def test_an_infinite_input_makes_a_result_that_is_not_finite():
    """The overflow guard looks at the gradient norm; fp8 must not hide what it is there to find."""
    x = random_bf16(16, 16)
    x[0, 0] = float("inf")
    y = fp8_linear(random_bf16(16, 16))(x)
    assert not torch.isfinite(y).all()


def test_weights_that_are_quantized_together_have_scales_of_their_own():
    assert_requantized_as_each_alone("cpu")


@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_feed_forward_equals_its_two_linears_with_swiglu_between_them(bias):
    """With biases it is not fused: none is left out."""
    x, dy = random_bf16(2, 16, 32), random_bf16(2, 16, 32)
    up, down = fp8_linear(random_bf16(2 * 48, 32, std=0.1)), fp8_linear(random_bf16(32, 48, std=0.1))
    if bias:
        up.bias, down.bias = (torch.nn.Parameter(random_bf16(len(w.weight))) for w in (up, down))

    def run(function):
        start = x.clone().requires_grad_()
        up.weight_grad, down.weight_grad = torch.zeros(2 * 48, 32), torch.zeros(32, 48)
        y = function(start)
        (y * dy).sum().backward()
        return y, start.grad, up.weight_grad, down.weight_grad

    fused = run(lambda x: feed_forward(Activation(x), up, swiglu, down)[0])
    for a, b in zip(fused, run(lambda x: down(swiglu(up(x)))), strict=True):
        assert error(a, b) < 0.02  # a CPU rounds silu(gate) to bf16 before the product


@pytest.mark.parametrize("preset", ["qwen3", "gpt2"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_an_amax_that_a_norms_backward_hands_on_changes_no_bit(preset, recomputed, monkeypatch):
    sizes = dict(n_layer=2, n_head=4, n_embd=64, d_ff=128, vocab_size=96, block_size=32)
    model = build_model(model_config(preset, **sizes), dtype=torch.bfloat16).init_weights("cpu", seed=0)
    use_recipe_in(model, "fp8_tensorwise")
    if recomputed:
        for block in model.blocks:
            block.compute = partial(checkpoint, block.compute, use_reentrant=False)
    ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))

    def results(tells_amax):
        fake_norm.use(monkeypatch, model, layers_tell=tells_amax)
        loss = model(ids, ids)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    apart = results(False)
    assert not fake_norm.handed
    assert all(map(torch.equal, results(True), apart))
    assert len(fake_norm.handed) == 4 and all(fake_norm.handed)  # of two layers in two blocks


def test_an_fp8_head_gives_the_loss_and_gradients_of_bf16_within_its_rounding():
    x, weight = random_bf16(64, 32).requires_grad_(), random_bf16(80, 32, std=0.2)
    targets = torch.arange(64) % 80
    targets[5] = -100
    layer, total = fp8_linear(weight), torch.zeros(80, 32)
    layer.weight_grad = total
    loss = LinearCrossEntropy.apply(x, weight, targets, layer, 2, True, None)
    loss.backward()
    wide = x.detach().float().requires_grad_(), weight.float().requires_grad_()
    expected = F.cross_entropy(F.linear(*wide), targets)
    dx, dweight = torch.autograd.grad(expected, wide)
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    assert [error(x.grad, dx), error(total, dweight)] == pytest.approx([0.0359, 0.0354], abs=3e-4)


def test_torchao_quantizes_and_multiplies_alike():
    """torchao's tensorwise recipe is the reference (Linear, dynamic scaling, same types)."""
    torchao = pytest.importorskip("torchao.float8", reason="pip install torchao: the reference for fp8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = torchao.Float8LinearConfig(emulate=device == "cpu")
    weight, dy = random_bf16(48, 64, std=0.02, device=device), random_bf16(128, 48, device=device)
    reference = torch.nn.Linear(64, 48, bias=False, device=device, dtype=torch.bfloat16)
    reference.weight.data = weight.clone()
    reference = torchao.convert_to_float8_training(torch.nn.Sequential(reference), config=config)
    results = []
    for module in (reference, fp8_linear(weight)):
        x = random_bf16(128, 64, device=device).requires_grad_()
        y = module(x)
        (y * dy).sum().backward()
        results.append((y, x.grad, next(module.parameters()).grad))
    for theirs, ours in zip(*results, strict=True):
        assert error(ours, theirs) < 2e-3  # the same fp8 values; bf16 rounding of the results
