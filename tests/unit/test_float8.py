"""fp8 training: numerics against torchao, the emulated form on a CPU, every strategy, kernels on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from support.helpers import TINY, last_run, make_dataset, run_in_one_launch, run_train, write_config

from model import rotary_angles
from ops import float8
from ops.cross_entropy import LinearCrossEntropy
from ops.heads import Float8Heads, HeadLayout, Rotary, heads_forward
from ops.linear import Linear
from ops.swiglu import Float8SwiGLU, swiglu, swiglu_backward, swiglu_with_amax

E4M3, E5M2 = float8.FORWARD, float8.GRADIENT
FP8 = {**TINY, "dtype": "bfloat16", "low_precision": "fp8_tensorwise", "max_iters": 6}


def random(*shape, std=1.0, dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(sum(shape))
    return (std * torch.randn(*shape, generator=generator)).to(device, dtype)


def error(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def fp8_linear(weight):
    layer = Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    layer.float8 = float8.empty_like(weight)
    float8.requantize(weight, into=layer.float8)
    return layer


# --- numerics ---


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_magnitude_becomes_the_largest_fp8_number(dtype):
    x = random(32, 48, std=7.0)
    quantized = float8.quantize(x, dtype)
    assert quantized.values.float().abs().max() == torch.finfo(dtype).max
    assert torch.equal(quantized.transposed.float(), quantized.values.float().t())
    assert error(quantized.values.float() * quantized.inverse_scale, x) < (0.03 if dtype == E4M3 else 0.06)


def test_a_tensor_of_zeros_stays_finite():
    quantized = float8.quantize(torch.zeros(16, 16, dtype=torch.bfloat16), E4M3)
    assert torch.isfinite(quantized.inverse_scale) and not quantized.values.float().any()


def test_an_infinite_input_makes_a_result_that_is_not_finite():
    """The overflow guard looks at the gradient norm; fp8 must not hide what it is there to find."""
    x = random(16, 16)
    x[0, 0] = float("inf")
    y = fp8_linear(random(16, 16))(x)
    assert not torch.isfinite(y).all()


@pytest.mark.parametrize("into_sum", [True, False])
def test_an_fp8_linear_is_close_to_bf16_in_result_and_gradients(into_sum):
    x, weight, dy = random(4, 32, 64).requires_grad_(), random(48, 64, std=0.02), random(4, 32, 48)
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


def test_the_fused_feed_forward_equals_its_two_linears_with_swiglu_between_them():
    x, dy = random(2, 16, 32), random(2, 16, 32)
    up, down = fp8_linear(random(2 * 48, 32, std=0.1)), fp8_linear(random(32, 48, std=0.1))

    def run(function):
        start = x.clone().requires_grad_()
        up.weight_grad, down.weight_grad = torch.zeros(2 * 48, 32), torch.zeros(32, 48)
        y = function(start)
        (y * dy).sum().backward()
        return y, start.grad, up.weight_grad, down.weight_grad

    def fused(x):
        return Float8SwiGLU.apply(x, None, *up.float8_arguments, *down.float8_arguments)

    for a, b in zip(run(fused), run(lambda x: down(swiglu(up(x)))), strict=True):
        assert error(a, b) < 0.02  # a CPU rounds silu(gate) to bf16 before the product


def test_an_fp8_head_gives_the_loss_and_gradients_of_bf16_within_its_rounding():
    x, weight = random(64, 32).requires_grad_(), random(80, 32, std=0.2)
    targets = torch.arange(64) % 80
    targets[5] = -100
    w8 = float8.empty_like(weight)
    float8.requantize(weight, into=w8)
    total = torch.zeros(80, 32)
    loss = LinearCrossEntropy.apply(x, weight, targets, total, w8, 2, True)
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
    weight, dy = random(48, 64, std=0.02, device=device), random(128, 48, device=device)
    reference = torch.nn.Linear(64, 48, bias=False, device=device, dtype=torch.bfloat16)
    reference.weight.data = weight.clone()
    reference = torchao.convert_to_float8_training(torch.nn.Sequential(reference), config=config)
    layer = fp8_linear(weight)
    results = []
    for module in (reference, layer):
        x = random(128, 64, device=device).requires_grad_()
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
    for low in (fp8, head):  # rows 0, 20, 40 and 59
        assert low[0] == pytest.approx(bf16[0], rel=2e-4)
        assert low[1] == pytest.approx(bf16[1], rel=3e-3)
        assert low[2:] == pytest.approx(bf16[2:], rel=0.015)


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


def test_a_width_that_fp8_cannot_have_is_an_error_that_names_the_matrix(folder):
    config = write_config(folder / "odd.py", **{**FP8, "dataset": folder / "data", "d_ff": 72})
    done = run_train(config, f"--out_dir={folder / 'odd'}")
    assert done.returncode == 2
    assert "multiples of 16" in done.stderr and "blocks.0.ffn.down" in done.stderr


# --- kernels ---


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 64), (300, 6144), (2048, 2080)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_cast_kernel_gives_the_bits_of_the_plain_form(shape, dtype):
    x = random(*shape, std=3.0)
    plain, fused = float8.quantize(x, dtype), float8.quantize(x.cuda(), dtype)
    assert fused.inverse_scale.item() == plain.inverse_scale.item()
    for a, b in zip(fused[:2], plain[:2], strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 64), (272, 1056), (64, 6144)])
def test_the_swiglu_kernels_know_the_largest_magnitude_of_what_they_write(shape):
    M, F_ = shape
    g, dh = random(M, 2 * F_), random(M, F_)
    for function, inputs in ((swiglu_with_amax, (g,)), (swiglu_backward, (g, dh))):
        written, amax = function(*(t.cuda() for t in inputs))
        plain, plain_amax = function(*inputs)
        assert error(written.cpu(), plain) < 3e-3
        assert amax.shape == plain_amax.shape
        assert amax.amax() == written.abs().amax()


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [True, False])
def test_fused_fp8_heads_equal_an_fp8_linear_and_the_heads_kernel(norm):
    B, T, C, H, K, D = 2, 64, 96, 4, 2, 32
    layer = fp8_linear(random((H + 2 * K) * D, C, std=0.1, device="cuda"))
    norms = [torch.nn.Parameter(1 + 0.3 * random(D, device="cuda").float()) if norm else None for _ in "qk"]
    rotary = Rotary(*(t.cuda() for t in rotary_angles(T, D, 1e4)))
    outputs = [random(B, T, heads, D, device="cuda") for heads in (H, K, K)]

    def run(function):
        x = random(B, T, C, device="cuda").requires_grad_()
        layer.weight_grad = torch.zeros(layer.weight.shape, device="cuda")
        parts = function(x)
        loss = sum((p * o).float().sum() for p, o in zip(parts, outputs, strict=True))
        leaves = [x, *(n for n in norms if n is not None)]
        return [*parts, *torch.autograd.grad(loss, leaves), layer.weight_grad]

    eps = 1e-6 if norm else 0.0
    layout = HeadLayout(H, K, rotary, eps)
    fused = run(lambda x: Float8Heads.apply(x, None, *layer.float8_arguments, *norms, layout))
    apart = run(lambda x: heads_forward(layer(x), *norms, *rotary, H, K, eps))
    for a, b in zip(fused, apart, strict=True):
        assert error(a, b) < 1e-6


@pytest.mark.gpu
def test_an_fp8_matmul_equals_its_plain_form():
    a, b = float8.quantize(random(256, 128), E5M2), float8.quantize(random(64, 128), E4M3)
    plain = float8.matmul(a.values, b.values, a.inverse_scale, b.inverse_scale)
    moved = [t.cuda() for t in (a.values, b.values, a.inverse_scale, b.inverse_scale)]
    assert error(float8.matmul(*moved).cpu(), plain) < 4e-3
