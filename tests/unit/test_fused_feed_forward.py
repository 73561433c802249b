"""ffn_backend='quack': what refuses it, its gradients, and whole runs, with QuACK faked by plain PyTorch."""

import copy
import functools
import math
import sys

import pytest
import torch
from support.fake_quack import ACTIVATIONS, HERE, INTERFACE, MACHINE, MODULES, VERSIONS, metadata_of
from support.helpers import ROOT, TINY, last_run, make_dataset, run_in_one_launch, write_config
from support.tensors import close, random
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from common.errors import RunError, UserError
from model import FeedForward
from model_config import model_config
from ops.activation import Activation
from ops.feed_forward import feed_forward
from ops.ffn_backend import FfnBackend
from recipes import quack as backend
from recipes import quack_matmuls as quack
from recipes.quack import check_ffn_backend
from training.configuration import rules
from training.configuration.choices import find
from training.configuration.keys import TrainConfig
from training.hardware.capability import CPU, TABLE, lookup

QUACK = {"ffn_backend": "quack", "dtype": "bfloat16"}
MLP = {"ffn_type": "mlp", "activation": "gelu"}


def config_of(**keys):
    return TrainConfig(**{**TINY, "dataset": "none", **QUACK, **keys})


@pytest.fixture
def kernels(monkeypatch):
    """QuACK's kernels are the plain forms."""
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    torch._dynamo.reset()


@pytest.fixture
def machine(kernels, monkeypatch):
    """It has QuACK and a GPU for it, which is this CPU."""
    for owner, name, value in MACHINE:
        monkeypatch.setattr(owner, name, value)


def layer_of(activation, dtype=torch.float32, sums=False):
    keys = {} if activation == "swiglu" else MLP
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "d_ff": 24, "vocab_size": 64, "block_size": 8}
    layer = FeedForward(model_config("qwen3", **shape, **keys))
    for linear in (layer.up, layer.down):
        linear.weight.data = random(*linear.weight.shape, std=0.3)
        if sums:
            linear.weight.data = linear.weight.data.to(dtype)
            linear.weight_grad = torch.ones(linear.weight.shape)
    layer.compute = quack.fused_feed_forward
    return layer


def gradients_of(layer, forward, x, dy):
    """y, and the gradients of x, up and down; those of weights are (returned, added to a sum)."""
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    return [y.detach(), x.grad, *((w.weight.grad, w.weight_grad) for w in (layer.up, layer.down))]


def by_torch(layer, x, dy):
    """The same of the layer's other backend."""
    usual = copy.deepcopy(layer)
    usual.compute, usual.up.weight_grad, usual.down.weight_grad = feed_forward, None, None
    return gradients_of(usual, lambda x: usual(Activation(x))[0], x, dy)


# --- what cannot run is refused ---


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"dtype": "float32"}, "computes in bfloat16, but dtype='float32'; set dtype='bfloat16'"),
        ({"dtype": "float16"}, "but dtype='float16'"),
        ({"low_precision": "fp8_tensorwise"},
         "in bfloat16, but low_precision='fp8_tensorwise' does not; set low_precision='none'"),
        ({"activation": "gelu"}, "this model has 'swiglu' with 'gelu'; set one of these pairs"),
        ({"ffn_type": "mlp"}, "this model has 'mlp' with 'silu'; set one of these pairs"),
        ({"bias": True}, "adds no bias in the feed-forward layer, but bias=True; set bias=False"),
        ({"n_embd": 36, "head_dim": 8}, "multiples of 8, but n_embd=36; change n_embd"),
        ({"d_ff": 100}, "multiples of 8, but d_ff=100; change d_ff"),
    ],
)  # fmt: skip
def test_what_its_kernels_cannot_compute_is_refused_before_a_device_is_touched(keys, wanted):
    with pytest.raises(UserError) as error:
        rules.check(config_of(**keys), 1)
    assert wanted in str(error.value) and str(error.value).endswith("or ffn_backend='torch'")
    rules.check(config_of(**keys, ffn_backend="torch"), 1)


@pytest.mark.parametrize("keys", [{}, MLP, {"qkv_bias": True}], ids=["swiglu", "gelu", "bias of q, k, v"])
def test_what_its_kernels_can_compute_is_accepted(keys):
    rules.check(config_of(**keys), 1)


def refusal(here=HERE):
    with pytest.raises(UserError) as error:
        backend.Quack.require(here)
    return str(error.value)


def test_only_a_hopper_gpu_has_kernels_for_it(machine):
    assert find("ffn_backend", "quack") is backend.Quack
    assert [compute for compute in TABLE if not backend.Quack.problem(lookup(compute, ""))] == [(9, 0)]
    backend.Quack.require(lookup((9, 0), "NVIDIA H200"))
    for here, has in ((lookup((10, 0), "NVIDIA B200"), "NVIDIA B200 has 10.0"), (CPU, "the CPU has none")):
        message = refusal(here)
        assert "needs a Hopper GPU (compute capability 9.0: H100, H200)" in message
        assert f"but {has}; set --ffn_backend=torch" in message


NEEDS = "ffn_backend='quack' needs "
QUACK_OF_HERE, CUTLASS_OF_HERE = ({name: version} for name, version in VERSIONS.items())


@pytest.mark.parametrize(
    ("installed", "cuda", "wanted"),
    [
        (CUTLASS_OF_HERE, "13.0", "quack-kernels, not installed here: pip install -r requirements/quack.txt"),
        (QUACK_OF_HERE, "13.0", "nvidia-cutlass-dsl, not installed here: pip"),
        ({}, "13.0", "quack-kernels and nvidia-cutlass-dsl, not installed here: pip"),
        (VERSIONS, "12.6", f"a build of torch for CUDA 13, but torch {torch.__version__} is for CUDA 12.6"),
        (VERSIONS, None, f"a build of torch for CUDA 13, but torch {torch.__version__} is for CUDA None"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(machine, monkeypatch, installed, cuda, wanted):
    monkeypatch.setattr(backend, "metadata", metadata_of(installed))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert refusal().startswith(NEEDS + wanted) and refusal().endswith("or set --ffn_backend=torch")


def test_torch_needs_nothing_and_what_quack_needs_is_in_the_requirements_file():
    assert find("ffn_backend", "torch") is FfnBackend
    FfnBackend.require(CPU)
    assert (FfnBackend.problem(CPU), FfnBackend.describe(), FfnBackend.versions()) == (None, None, {})
    text = (ROOT / "requirements/quack.txt").read_text()
    assert all(name in text for name in backend.PACKAGES)
    assert f"[cu{backend.CUDA}]" in text


# --- the comparison at the start ---


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_right_kernels_pass_the_comparison_and_leave_the_random_numbers_of_a_run(kernels, activation):
    layer, state = layer_of(activation), torch.get_rng_state()
    check_ffn_backend(layer)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("kernel", "spoil", "named"),
    [
        ("gemm_act", lambda found: (found[0].roll(1, 0), found[1]), "the output of up"),
        ("gemm_act", lambda found: (found[0], found[1].mul(1.01)), "the activation"),
        ("gemm_act", lambda found: (found[0], found[1] * math.nan), "the activation"),
        ("gemm_dact", lambda found: (found[0].roll(1, 1), found[1]), "the gradient of up's output"),
        ("gemm_dact", lambda found: (found[0], found[1].roll(1, 0)), "the activation again"),
    ],
)
def test_wrong_numbers_end_the_run_at_the_start(kernels, monkeypatch, activation, kernel, spoil, named):
    right = getattr(INTERFACE, kernel)
    monkeypatch.setattr(INTERFACE, kernel, lambda *operands, **options: spoil(right(*operands, **options)))
    with pytest.raises(RunError, match=f"for {named} computes wrong numbers on this GPU.*ffn_backend=torch"):
        check_ffn_backend(layer_of(activation))


def test_a_kernel_that_does_not_run_ends_the_run_with_its_reason(kernels, monkeypatch):
    def fails(*operands, **options):
        raise ImportError("libcute.so: cannot open shared object file\nmore lines")

    monkeypatch.setattr(INTERFACE, "gemm_act", fails)
    with pytest.raises(RunError) as error:
        check_ffn_backend(layer_of("swiglu"))
    assert "do not run here: ImportError: libcute.so: cannot open shared object file; " in str(error.value)
    assert "pip install -r requirements/quack.txt, or set --ffn_backend=torch" in str(error.value)


# --- gradients ---


@pytest.mark.parametrize("sums", [False, True], ids=["returned", "added to sums"])
@pytest.mark.parametrize("form", ["eager", "compiled", "recomputed"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_torchs_backend(kernels, activation, form, sums):
    layer, x, dy = layer_of(activation, sums=sums), random(2, 8, 16), random(2, 8, 16, std=0.5)
    expected = by_torch(layer, x, dy)
    forward = layer
    if form == "compiled":
        forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    elif form == "recomputed":
        forward = functools.partial(checkpoint, layer, use_reentrant=False)

    def value(x):
        y, gradient_amax = forward(Activation(x))
        assert gradient_amax is None
        return y

    y, dx, *of_weights = gradients_of(layer, value, x, dy)
    close(y, expected[0], 1e-5)
    close(dx, expected[1], 1e-5)
    for (gradient, total), (plain, _) in zip(of_weights, expected[2:], strict=True):
        assert (gradient is None) == sums
        close(total - 1 if sums else gradient, plain, 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_in_fp32_are_cast_to_the_dtype_of_the_input(kernels, activation):
    layer, x, dy = layer_of(activation), random(4, 16), random(4, 16)
    expected = by_torch(layer, x, dy)
    y, dx, *of_weights = gradients_of(layer, lambda x: layer(Activation(x))[0], x.bfloat16(), dy.bfloat16())
    assert y.dtype == dx.dtype == torch.bfloat16
    close(y, expected[0], 2e-2)
    close(dx, expected[1], 2e-2)
    for (gradient, _), (plain, _) in zip(of_weights, expected[2:], strict=True):
        assert gradient.dtype == torch.float32
        close(gradient, plain, 2e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_two_matmuls_are_counted_and_have_the_shapes_that_the_compiler_is_told(kernels, activation):
    layer, x = layer_of(activation), random(8, 16).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layer(Activation(x))[0].sum().backward()
    counts = {str(operator): n for operator, n in counter.get_flop_counts()["Global"].items()}
    assert counts["nanomfu.activated_matmul"] == 2 * 8 * layer.up.weight.numel()
    assert counts["nanomfu.activation_backward_matmul"] == 2 * 8 * layer.down.weight.numel()
    x, up, down = x.detach(), layer.up.weight.data, layer.down.weight.data
    for function, arguments in (
        (quack.activated_matmul, (x, up, activation)),
        (quack.activation_backward_matmul, (x, down, random(8, len(up)), activation)),
    ):
        torch.library.opcheck(function, arguments, test_utils=("test_schema", "test_faketensor"))


# --- whole runs ---


RUN = {**TINY, **QUACK, **MLP, "max_iters": 6, "eval_interval": 3, "keep_last": None}
STRATEGIES = {
    "ddp": [],
    "zero1": ["--use_zero1=True"],
    "fsdp": ["--use_fsdp=True"],
    "fsdp_full": ["--use_fsdp=True", "--reshard_after_forward=True", "--activation_checkpointing=full"],
}


@pytest.fixture
def files(tmp_path):
    make_dataset(tmp_path / "tokens")
    write_config(tmp_path / "run.py", **RUN, dataset=str(tmp_path / "tokens"), out_dir=str(tmp_path / "out"))
    return tmp_path


def losses(out):
    return [row["loss"] for row in last_run(out)["training_iterations"]]


def test_a_run_that_cannot_have_it_ends_with_one_line_and_a_dry_run_warns_of_another_gpu(run, files, capfd):
    for gpu, refused in (("H100", False), ("A100-40GB", True)):
        assert run(files / "run.py", "--dry_run=True", f"--gpu={gpu}", "--device=cuda") == 0
        shown = capfd.readouterr().out
        assert "Feed-forward backend:        quack" in shown
        assert ("is no Hopper GPU; use --ffn_backend=torch" in shown) == refused
    assert run(files / "run.py") == 2
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "error" in line)
    assert "ffn_backend='quack' needs a Hopper GPU" in line and "the CPU has none" in line
    assert not list((files / "out").glob("run_*.json"))


@pytest.mark.resume
def test_a_run_learns_as_with_torch_and_a_resume_may_change_it_and_both_say_so(run, files, machine, capfd):
    assert run(files / "run.py") == 0
    record = last_run(files / "out")
    assert record["startup_info"]["ffn_backend"]["used"] == "quack"
    assert record["startup_info"]["software"].items() >= VERSIONS.items()
    assert "Feed-forward backend:        quack 0.6.5 (CUTLASS DSL 4.7.1)" in capfd.readouterr().out
    assert run(files / "run.py", "--ffn_backend=torch", f"--out_dir={files / 'torch'}") == 0
    assert "Feed-forward backend" not in capfd.readouterr().out
    usual = last_run(files / "torch")
    assert "ffn_backend" not in usual["startup_info"]
    assert not VERSIONS.keys() & usual["startup_info"]["software"].keys()
    assert losses(files / "out") == pytest.approx(losses(files / "torch"), rel=5e-4)
    assert losses(files / "out")[-1] < losses(files / "out")[0]
    assert run(files / "run.py", "--init_from=resume", "--ffn_backend=torch", "--max_iters=7") == 0
    assert "ffn_backend was 'quack' when it was saved, is 'torch' now" in capfd.readouterr().out
    changed = last_run(files / "out")["startup_info"]["changed_since_checkpoint"]
    assert changed["ffn_backend"] == ["quack", "torch"]


def test_every_strategy_learns_the_same(run, files, machine):
    flags = ["--batch_size=2", "--gradient_accumulation_steps=2"]
    commands = [
        [files / "run.py", *flags, *extra, f"--out_dir={files / name}"] for name, extra in STRATEGIES.items()
    ]
    run_in_one_launch(files, commands, processes=2, worker="tests/support/fake_quack.py")
    assert run(files / "run.py", "--batch_size=2", "--gradient_accumulation_steps=4") == 0
    for name in STRATEGIES:
        assert losses(files / name) == pytest.approx(losses(files / "out"), rel=1e-3), name
