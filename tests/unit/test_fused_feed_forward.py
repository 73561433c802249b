"""ffn_backend='quack': what refuses it, its gradients, and whole runs, with QuACK faked by plain PyTorch."""

import copy
import dataclasses
import importlib.util
import math
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from support.fake_quack import HERE, KERNELS, MACHINE, VERSIONS, metadata_of
from support.helpers import ROOT, TINY, last_run, make_dataset, run_in_one_launch, write_config
from support.tensors import close, random
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import model_builder
from common.errors import RunError, UserError
from model import FeedForward
from model_config import model_config
from ops import quack
from ops.activation import Activation
from ops.feed_forward import feed_forward
from ops.swiglu import swiglu
from training.configuration.dtypes import DTYPES
from training.configuration.files_and_flags import load_config
from training.configuration.keys import TrainConfig
from training.hardware.capability import CPU, TABLE, lookup
from training.optimization import ffn_backend
from training.optimization.ffn_backend import check_ffn_backend, require_ffn_backend, use_ffn_backend

QUACK = {"ffn_backend": "quack", "dtype": "bfloat16"}
MLP = {"ffn_type": "mlp", "activation": "gelu"}
ACTIVATIONS = ["swiglu", "gelu"]


def config_of(**keys):
    return TrainConfig(**{**TINY, **QUACK, **keys})


@pytest.fixture
def kernels(monkeypatch):
    """QuACK's kernels are the plain forms."""
    for owner, name, value in KERNELS:
        monkeypatch.setattr(owner, name, value)
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


def by_autograd(layer, x):
    """The layer as its docstring says it, with gate and up in turns among the columns."""
    y = F.linear(x, layer.up.weight.to(x.dtype))
    h = F.silu(y[..., 0::2]) * y[..., 1::2] if layer.activation is swiglu else F.gelu(y, approximate="tanh")
    return F.linear(h, layer.down.weight.to(x.dtype))


def gradients_of(layer, forward, x, dy):
    """y, and the gradients of x, up and down."""
    x = x.clone().requires_grad_()
    y = forward(x)
    y.backward(dy)
    return [y.detach(), x.grad, *((w.weight.grad, w.weight_grad) for w in (layer.up, layer.down))]


# --- what cannot run is refused ---


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--dtype=float32"], "computes in bfloat16, but dtype='float32'; set dtype='bfloat16'"),
        (["--dtype=float16"], "but dtype='float16'"),
        (
            ["--low_precision=fp8_tensorwise"],
            "in bfloat16, but low_precision='fp8_tensorwise' does not; set low_precision='none'",
        ),
        (["--activation=gelu"], "this model has 'swiglu' with 'gelu'; set one of these pairs"),
        (["--ffn_type=mlp"], "this model has 'mlp' with 'silu'; set one of these pairs"),
        (["--bias=True"], "adds no bias in the feed-forward layer, but bias=True; set bias=False"),
        (["--n_embd=36", "--head_dim=8"], "multiples of 8, but n_embd=36; change n_embd"),
        (["--d_ff=100"], "multiples of 8, but d_ff=100; change d_ff"),
    ],
)
def test_what_its_kernels_cannot_compute_is_refused_before_a_device_is_touched(tmp_path, flags, wanted):
    path = write_config(tmp_path / "run.py", **{**TINY, **QUACK})
    with pytest.raises(UserError) as error:
        load_config([str(path), *flags])
    assert wanted in str(error.value) and str(error.value).endswith("or ffn_backend='torch'")
    load_config([str(path), *flags, "--ffn_backend=torch"])


@pytest.mark.parametrize("keys", [{}, MLP, {"qkv_bias": True}], ids=["swiglu", "gelu", "bias of q, k, v"])
def test_what_its_kernels_can_compute_is_accepted(tmp_path, keys):
    path = write_config(tmp_path / "run.py", **{**TINY, **QUACK, **keys})
    assert load_config([str(path)]).ffn_backend == "quack"


def refusal(here=HERE):
    with pytest.raises(UserError) as error:
        require_ffn_backend(config_of(), here)
    return str(error.value)


def test_only_a_hopper_gpu_has_kernels_for_it(machine):
    assert [compute for compute, row in TABLE.items() if row.quack] == [(9, 0)]
    require_ffn_backend(config_of(), lookup((9, 0), "NVIDIA H200"))
    for here, has in ((lookup((10, 0), "NVIDIA B200"), "NVIDIA B200 has 10.0"), (CPU, "the CPU has none")):
        message = refusal(here)
        assert "needs a Hopper GPU (compute capability 9.0: H100, H200)" in message
        assert f"but {has}; set --ffn_backend=torch" in message


@pytest.mark.parametrize("missing", [*VERSIONS, "both"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(machine, monkeypatch, missing):
    left = {name: version for name, version in VERSIONS.items() if missing not in (name, "both")}
    monkeypatch.setattr(ffn_backend, "metadata", metadata_of(left))
    named = " and ".join(VERSIONS) if missing == "both" else missing
    assert refusal() == (
        f"ffn_backend='quack' needs {named}, not installed here: "
        "pip install -r requirements-quack.txt, or set --ffn_backend=torch"
    )


def test_another_version_of_quack_is_refused(machine, monkeypatch):
    monkeypatch.setattr(ffn_backend, "metadata", metadata_of({**VERSIONS, "quack-kernels": "0.7.0"}))
    assert "needs quack-kernels 0.6.5, whose internal functions it calls, but 0.7.0 is installed" in refusal()


@pytest.mark.parametrize("cuda", ["12.6", None])
def test_a_torch_for_another_cuda_is_refused(machine, monkeypatch, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f"a build of torch for CUDA 13, but torch {torch.__version__} is for CUDA {cuda}" in refusal()


def test_torch_needs_nothing():
    require_ffn_backend(config_of(ffn_backend="torch"), CPU)


def test_the_versions_are_those_of_the_requirements_file():
    text = (ROOT / "requirements-quack.txt").read_text()
    assert f"quack-kernels=={ffn_backend.VERSION}" in text
    assert all(name in text for name in ffn_backend.PACKAGES)
    assert f"[cu{ffn_backend.CUDA}]" in text


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
        ("quack_forward", lambda found: (found[0].roll(1, 0), found[1]), "the output of up"),
        ("quack_forward", lambda found: (found[0], found[1].mul(1.01)), "the activation"),
        ("quack_forward", lambda found: (found[0], found[1] * math.nan), "the activation"),
        ("quack_backward", lambda found: found.roll(1, 1), "the gradient of up's output"),
    ],
)
def test_wrong_numbers_end_the_run_at_the_start(kernels, monkeypatch, activation, kernel, spoil, named):
    right = getattr(quack, kernel)
    monkeypatch.setattr(quack, kernel, lambda *arguments: spoil(right(*arguments)))
    with pytest.raises(RunError, match=f"for {named} computes wrong numbers on this GPU.*ffn_backend=torch"):
        check_ffn_backend(layer_of(activation))


def test_a_kernel_that_does_not_run_ends_the_run_with_its_reason(monkeypatch):
    def fails(*arguments):
        raise ImportError("libcute.so: cannot open shared object file\nmore lines")

    monkeypatch.setattr(quack, "quack_forward", fails)
    with pytest.raises(RunError) as error:
        check_ffn_backend(layer_of("swiglu"))
    assert "do not run here: ImportError: libcute.so: cannot open shared object file; " in str(error.value)
    assert "pip install -r requirements-quack.txt, or set --ffn_backend=torch" in str(error.value)


# --- gradients ---


@pytest.mark.parametrize("sums", [False, True], ids=["returned", "added to sums"])
@pytest.mark.parametrize("form", ["eager", "compiled", "recomputed"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_those_of_autograd(kernels, activation, form, sums):
    layer, x, dy = layer_of(activation, sums=sums), random(2, 8, 16), random(2, 8, 16, std=0.5)
    reference = copy.deepcopy(layer)
    expected = gradients_of(reference, lambda x: by_autograd(reference, x), x, dy)
    forward = layer
    if form == "compiled":
        forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    elif form == "recomputed":
        forward = lambda x: checkpoint(layer, x, use_reentrant=False)  # noqa: E731

    def value(x):
        y, gradient_amax = forward(Activation(x))
        assert gradient_amax is None
        return y

    y, dx, *of_weights = gradients_of(layer, value, x, dy)
    close(y, expected[0], 1e-5)
    close(dx, expected[1], 1e-5)
    for (gradient, total), (plain, _) in zip(of_weights, expected[2:], strict=True):
        if sums:
            assert gradient is None
            close(total, 1 + plain, 1e-5)
        else:
            close(gradient, plain, 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_in_fp32_are_cast_to_the_dtype_of_the_input(kernels, activation):
    layer, x, dy = layer_of(activation), random(4, 16), random(4, 16)
    reference = copy.deepcopy(layer)
    expected = gradients_of(reference, lambda x: by_autograd(reference, x), x, dy)
    y, dx, *of_weights = gradients_of(layer, lambda x: layer(Activation(x))[0], x.bfloat16(), dy.bfloat16())
    assert y.dtype == dx.dtype == torch.bfloat16
    close(y, expected[0], 2e-2)
    close(dx, expected[1], 2e-2)
    for (gradient, _), (plain, _) in zip(of_weights, expected[2:], strict=True):
        assert gradient.dtype == torch.float32
        close(gradient, plain, 2e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_computes_the_same_by_both_backends(kernels, activation):
    layer, x, dy = layer_of(activation), random(4, 16), random(4, 16)
    usual = copy.deepcopy(layer)
    usual.compute = feed_forward
    expected = gradients_of(usual, lambda x: usual(Activation(x))[0], x, dy)
    found = gradients_of(layer, lambda x: layer(Activation(x))[0], x, dy)
    close(found[0], expected[0], 1e-5)
    close(found[1], expected[1], 1e-5)
    for (gradient, _), (plain, _) in zip(found[2:], expected[2:], strict=True):
        close(gradient, plain, 1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_its_two_matmuls_are_counted(kernels, activation):
    layer, x = layer_of(activation), random(8, 16).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layer(Activation(x))[0].sum().backward()
    counts = {str(operator): n for operator, n in counter.get_flop_counts()["Global"].items()}
    assert counts["nanomfu.activated_matmul"] == 2 * 8 * layer.up.weight.numel()
    assert counts["nanomfu.activation_backward_matmul"] == 2 * 8 * layer.down.weight.numel()


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_shapes_that_the_compiler_is_told_are_those_of_the_results(kernels, activation, operation):
    layer, x = layer_of(activation), random(8, 16)
    up, down = layer.up.weight.data, layer.down.weight.data
    function, arguments = {
        "forward": (quack.activated_matmul, (x, up, activation)),
        "backward": (quack.activation_backward_matmul, (x, down, random(8, len(up)), activation)),
    }[operation]
    torch.library.opcheck(function, arguments, test_utils=("test_schema", "test_faketensor"))


# --- what QuACK is asked for ---


@pytest.fixture
def library(monkeypatch):
    """Modules named as QuACK's, which note what is asked of them."""
    asked = []

    def module(name, **content):
        found = ModuleType(name)
        found.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, found)

    def kernel(name):
        def call(*tensors, out, config, tuned):
            asked.append((name, [None if t is None else tuple(t.shape) for t in tensors], config))
            asked.append({name: tuple(buffer.shape) for name, buffer in out.items()})
            assert tuned is False
            for buffer in out.values():
                buffer.zero_()

        return call

    module("quack")
    module("quack.epilogue")
    module("quack.gemm_config", GemmConfig=lambda **keys: tuple(sorted(keys.items())))
    module("quack.activation", dgate_fn_map={"swiglu": "dgate"}, dact_fn_map={"gelu_tanh_approx": "dact"})
    module("quack.epilogue.frontend", gemm_epilogue=lambda outputs, ops, mode=None: lambda body: kernel(body))
    module(
        "quack.epilogue.library",
        linear_act_mod=lambda name, gated, **others: kernel((name, gated, any(others.values()))),
        _gen_epi_fn=lambda name, tag, operands, body, functions: (operands, *body, functions),
    )
    for cached in (quack._config, quack._forward_kernel, quack._backward_kernel):
        cached.cache_clear()
    yield asked
    for cached in (quack._config, quack._forward_kernel, quack._backward_kernel):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("activation", "N", "gated"), [("swiglu", 48, True), ("gelu_tanh_approx", 24, False)]
)
def test_a_kernel_gets_its_operands_in_quacks_shapes(library, activation, N, gated):
    name = "swiglu" if gated else "gelu"
    quack.quack_forward(random(8, 16), random(N, 16), name)
    quack.quack_backward(random(8, 16), random(16, 24), random(8, N), name)
    (forward, shapes, config), outputs, (body, back_shapes, again), back_outputs = library
    assert forward == (activation, gated, False)
    assert shapes == [(8, 16), (16, N), None] and outputs == {"D": (8, N), "mAuxOut": (8, 24)}
    assert body[0] == ["c"] and body[-1] == ({"dgate": "dgate"} if gated else {"dact": "dact"})
    assert back_shapes == [(8, 16), (16, 24), (8, N)] and back_outputs == {"D": (8, N)}
    assert config is again  # QuACK's cache knows it by its id()


# --- whole runs ---


RUN = {**TINY, **QUACK, **MLP, "max_iters": 6, "eval_interval": 3, "keep_last": None}
STRATEGIES = {
    "ddp": [],
    "zero1": ["--use_zero1=True"],
    "fsdp": ["--use_fsdp=True"],
    "fsdp, reshard, full": [
        *("--use_fsdp=True", "--reshard_after_forward=True", "--activation_checkpointing=full")
    ],
}


@pytest.fixture
def files(tmp_path):
    make_dataset(tmp_path / "tokens")
    write_config(tmp_path / "run.py", **RUN, dataset=str(tmp_path / "tokens"), out_dir=str(tmp_path / "out"))
    return tmp_path


def losses(out):
    return [row["loss"] for row in last_run(out)["training_iterations"]]


def test_a_run_that_cannot_have_it_ends_with_one_line(run, files, capfd):
    assert run(files / "run.py") == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "ffn_backend='quack' needs a Hopper GPU" in lines[0] and "the CPU has none" in lines[0]
    assert not list((files / "out").glob("run_*.json"))


@pytest.mark.skipif(importlib.util.find_spec("quack") is not None, reason="QuACK is installed here")
def test_a_run_without_the_package_ends_with_the_command_that_installs_it(run, files, capfd, monkeypatch):
    monkeypatch.setattr("training.inputs.capability", lambda device: HERE)
    assert run(files / "run.py") == 2
    message = capfd.readouterr().err
    assert "needs quack-kernels and nvidia-cutlass-dsl, not installed here" in message
    assert "pip install -r requirements-quack.txt" in message


def test_a_run_learns_as_with_torch_and_reports_what_it_used(run, files, machine, capfd):
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


def test_a_gated_model_trains_and_its_layers_have_the_backend(run, files, machine):
    assert run(files / "run.py", "--ffn_type=swiglu", "--activation=silu") == 0
    assert losses(files / "out")[-1] < losses(files / "out")[0]
    config = config_of()
    model = model_builder.build_model(config.model_config(), dtype=DTYPES[config.dtype])
    model.init_weights(torch.device("cpu"), seed=1)
    use_ffn_backend(model, config)
    assert all(block.ffn.compute is quack.fused_feed_forward for block in model.blocks)
    use_ffn_backend(model, dataclasses.replace(config, ffn_backend="torch"))


@pytest.mark.resume
def test_a_resume_may_change_it_and_says_so(run, files, machine, capfd):
    assert run(files / "run.py", "--max_iters=3") == 0
    assert run(files / "run.py", "--init_from=resume", "--ffn_backend=torch") == 0
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


def test_a_dry_run_names_the_backend_and_warns_of_another_gpu(run, files, capfd):
    for gpu, refused in (("H100", False), ("A100-40GB", True)):
        assert run(files / "run.py", "--dry_run=True", f"--gpu={gpu}", "--device=cuda") == 0
        shown = capfd.readouterr().out
        assert "Feed-forward backend:        quack" in shown
        assert ("is no Hopper GPU; use --ffn_backend=torch" in shown) == refused
