"""fp8 training: numerics against torchao, the plain form on a CPU, every strategy, kernels on a GPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support import fake_norm
from support.helpers import TINY, last_run, make_dataset, run_in_one_launch, write_config
from support.tensors import (
    E4M3,
    E5M2,
    assert_requantized_as_each_alone,
    error,
    fp8_linear,
    random_bf16,
    use_recipe,
)
from torch.utils.checkpoint import checkpoint

from model_builder import build_model
from model_config import model_config
from ops import float8
from ops.activation import Activation
from ops.cross_entropy import LinearCrossEntropy
from ops.feed_forward import feed_forward
from ops.linear import Linear
from ops.swiglu import swiglu

FP8 = {**TINY, "dtype": "bfloat16", "low_precision": "fp8_tensorwise", "max_iters": 6}


# --- numerics ---


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_magnitude_becomes_the_largest_fp8_number(dtype):
    x = random_bf16(32, 48, std=7.0)
    quantized = float8.quantize(x, dtype)
    assert quantized.rows.float().abs().max() == torch.finfo(dtype).max
    assert torch.equal(quantized.columns.float(), quantized.rows.float().t())
    assert error(quantized.rows.float() * quantized.inverse_scale, x) < (0.03 if dtype == E4M3 else 0.06)


def test_a_tensor_of_zeros_stays_finite():
    quantized = float8.quantize(torch.zeros(16, 16, dtype=torch.bfloat16), E4M3)
    assert torch.isfinite(quantized.inverse_scale) and not quantized.rows.float().any()


def test_an_infinite_input_makes_a_result_that_is_not_finite():
    """The overflow guard looks at the gradient norm; fp8 must not hide what it is there to find."""
    x = random_bf16(16, 16)
    x[0, 0] = float("inf")
    y = fp8_linear(random_bf16(16, 16))(x)
    assert not torch.isfinite(y).all()


@pytest.mark.parametrize("into_sum", [True, False])
def test_an_fp8_linear_is_close_to_bf16_in_result_and_gradients(into_sum):
    x, weight, dy = (
        random_bf16(4, 32, 64).requires_grad_(),
        random_bf16(48, 64, std=0.02),
        random_bf16(4, 32, 48),
    )
    layer = fp8_linear(weight)
    total = torch.zeros(48, 64) if into_sum else None
    layer.weight_grad = total
    y = layer(x)
    (y * dy).sum().backward()
    wide = x.detach().float().requires_grad_(), weight.float().requires_grad_()
    expected = F.linear(*wide)
    dx, dweight = torch.autograd.grad((expected * dy.float()).sum(), wide)
    # what the two dtypes round: 3 bits of mantissa in both factors; 3 in one and 2 in the other
    assert error(y, expected) == pytest.approx(0.0377, abs=0.002)
    assert error(x.grad, dx) == pytest.approx(0.0600, abs=0.003)
    assert error(total if into_sum else layer.weight.grad, dweight) == pytest.approx(0.0600, abs=0.003)


def test_weights_that_are_quantized_together_have_scales_of_their_own():
    assert_requantized_as_each_alone("cpu")


def test_the_fused_feed_forward_equals_its_two_linears_with_swiglu_between_them():
    x, dy = random_bf16(2, 16, 32), random_bf16(2, 16, 32)
    up, down = fp8_linear(random_bf16(2 * 48, 32, std=0.1)), fp8_linear(random_bf16(32, 48, std=0.1))

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
    for layer in (m for m in model.modules() if isinstance(m, Linear)):
        use_recipe(layer, "fp8_tensorwise")
    if recomputed:
        for block in model.blocks:
            monkeypatch.setattr(block, "forward", partial(checkpoint, block.forward, use_reentrant=False))
    ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))

    def results(tells_amax):
        fake_norm.use(monkeypatch, tells_amax)
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
    low = fp8_linear(weight).low_precision
    total = torch.zeros(80, 32)
    loss = LinearCrossEntropy.apply(x, weight, targets, total, low, 2, True, None)
    loss.backward()
    wide = x.detach().float().requires_grad_(), weight.float().requires_grad_()
    expected = F.cross_entropy(F.linear(*wide), targets)
    dx, dweight = torch.autograd.grad(expected, wide)
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    assert [error(x.grad, dx), error(total, dweight)] == pytest.approx([0.0359, 0.0354], abs=3e-4)


def test_torchao_quantizes_and_multiplies_alike():
    """torchao's tensorwise recipe is the reference (Linear, dynamic scaling, same types)."""
    torchao = pytest.importorskip("torchao.float8", reason="pip install torchao: the reference for fp8")
    config = torchao.Float8LinearConfig(emulate=not torch.cuda.is_available())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight, dy = random_bf16(48, 64, std=0.02, device=device), random_bf16(128, 48, device=device)
    reference = torch.nn.Linear(64, 48, bias=False, device=device, dtype=torch.bfloat16)
    reference.weight.data = weight.clone()
    reference = torchao.convert_to_float8_training(torch.nn.Sequential(reference), config=config)
    layer = fp8_linear(weight)
    results = []
    for module in (reference, layer):
        x = random_bf16(128, 64, device=device).requires_grad_()
        y = module(x)
        (y * dy).sum().backward()
        results.append((y, x.grad, next(module.parameters()).grad))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert error(ours, theirs) < 2e-3  # the same fp8 values; bf16 rounding of the results


# --- training ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float8")
    make_dataset(folder / "data")
    return folder


def losses(folder, runs: dict[str, dict], processes=1) -> list[list[float]]:
    """Of runs in folders of these names with these keys, by the same processes one after another."""
    commands = []
    for name, keys in runs.items():
        path = folder / f"{name.replace(' ', '-')}.py"
        config = write_config(path, **{**FP8, "dataset": folder / "data", **keys})
        commands.append([config, f"--out_dir={folder / name.split()[0]}"])
    run_in_one_launch(folder, commands, processes)
    records = [last_run(folder / name.split()[0]) for name in runs]
    return [[row["loss"] for row in record["training_iterations"]] for record in records]


def test_fp8_trains_on_a_cpu_and_follows_bf16(folder):
    keys = {"max_iters": 60, "log_interval": 20}
    with_head = {"low_precision_scope": "layers_and_head"}
    runs = {"layers": keys, "head": keys | with_head, "bf16": keys | {"low_precision": "none"}}
    fp8, head, bf16 = losses(folder, runs)
    assert bf16[-1] < 0.8 * bf16[0]
    assert len({fp8[0], head[0], bf16[0]}) == 3  # each did compute in another precision
    for low in (fp8, head):  # rows 0, 20, 40 and 59; of 8 drawn models the largest distance was 0.023
        assert low[0] == pytest.approx(bf16[0], rel=2e-4)
        assert low[1:] == pytest.approx(bf16[1:], rel=0.03)


def test_every_strategy_trains_in_fp8_like_one_process(folder):
    """Not bit-equal: each process scales its own activations by their own maximum."""
    (one,) = losses(folder, {"one": {"batch_size": 2, "gradient_accumulation_steps": 4}})
    keys = {"batch_size": 2, "gradient_accumulation_steps": 2, "eval_interval": 3}
    fsdp = {"use_fsdp": True, "reshard_after_forward": True}
    for several in losses(folder, {"ddp": keys, "zero1": keys | {"use_zero1": True}, "fsdp": keys | fsdp}, 2):
        assert several == pytest.approx(one, rel=0.01)


@pytest.mark.parametrize(("keys", "processes"), [({}, 1), ({"use_fsdp": True}, 2)])
def test_an_fp8_run_resumes_bit_equal(folder, keys, processes):
    part = f"part-{processes}"
    runs = {f"whole-{processes}": keys, f"{part} begun": keys | {"max_iters": 3}}
    runs[f"{part} resumed"] = keys | {"init_from": "resume"}
    whole, _, resumed = losses(folder, runs, processes)
    assert resumed == whole  # its record begins with the first part's rows


@pytest.mark.parametrize(
    ("flag", "matrix"),
    [("--d_ff=72", "blocks.0.ffn.down is (32, 72)"), ("--head_dim=6", "blocks.0.attn.out is (32, 24)")],
)
def test_a_width_that_fp8_cannot_have_is_an_error_that_names_the_matrix(folder, run, capsys, flag, matrix):
    config = write_config(folder / "odd.py", **{**FP8, "dataset": folder / "data"})
    assert run(config, f"--out_dir={folder / 'odd'}", flag) == 2
    said = capsys.readouterr().err
    assert "multiples of 16" in said and matrix in said and "head_dim" in said


@pytest.mark.parametrize(
    ("flags", "got"),
    [(["--block_size=15"], "is 60"), (["--loss_chunks=4", "--block_size=8"], "in 4 loss_chunks")],
)
def test_a_number_of_tokens_that_fp8_cannot_have_is_an_error_that_says_how_many(
    folder, run, capsys, flags, got
):
    config = write_config(folder / "tokens.py", **{**FP8, "dataset": folder / "data", "batch_size": 4})
    scope = "--low_precision_scope=layers_and_head"
    assert run(config, f"--out_dir={folder / 'tokens'}", scope, *flags) == 2
    said = capsys.readouterr().err
    assert "multiple of 16 tokens" in said and got in said and "block_size" in said


def test_wide_heads_with_biases_train_in_fp8_as_in_bf16(folder):
    keys = {"max_iters": 40, "log_interval": 20, "head_dim": 16, "qkv_bias": True}
    fp8, bf16 = losses(folder, {"wide": keys, "wide-bf16": keys | {"low_precision": "none"}})
    assert fp8[0] != bf16[0] and bf16[-1] < 0.9 * bf16[0]
    assert fp8[-1] == pytest.approx(bf16[-1], rel=0.03)
