"""ffn_backend='quack' on a Hopper GPU: QuACK's kernels against plain arithmetic, and runs against torch's."""

import pytest
import torch
from support.gpu_runs import STRATEGIES, TWO_GPUS, losses, train
from support.helpers import SMALL_RUN, checkpoint_tensors, make_dataset, write_config
from support.tensors import error

from model import FeedForward
from ops.activation import Activation
from recipes import quack_matmuls as quack
from recipes.quack import TOLERANCE, Quack
from training.configuration.keys import TrainConfig
from training.hardware.capability import capability

INSTALL = "needs QuACK: pip install -r requirements/quack.txt"
SHAPES = {"qwen3": (2048, 6144), "gpt2": (2304, 9216), "qwen2.5": (1536, 8960)}  # C, F
RUN = {**SMALL_RUN, "lr_decay_iters": 20}
GPT2 = {"arch_preset": "gpt2", "num_key_value_heads": 4}
MODELS = {"gated": {}, "gpt2": GPT2}
VARIANTS = {
    "compiled": [],
    "eager": ["--compile=False"],
    "graphs": ["--use_cuda_graphs=True"],
    "recomputed": ["--activation_checkpointing=full"],
}


def obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    here = capability("cuda")
    if Quack.problem(here):
        return "needs a Hopper GPU"
    try:
        Quack.require(here)
    except Exception as problem:
        return f"{INSTALL} ({problem})"
    return None


OBSTACLE = obstacle()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]


# --- operations ---


def randn(*shape, std=1.0):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return (std * torch.randn(*shape, generator=generator, device="cuda")).bfloat16()


def operands(activation, tokens, shape):
    """Of both operations: the arguments, and the operation beside its plain form."""
    C, width = SHAPES[shape]
    N = 2 * width if activation == quack.SWIGLU else width
    forward = randn(tokens, C), randn(N, C, std=C**-0.5), activation
    backward = randn(tokens, C), randn(C, width, std=C**-0.5), randn(tokens, N), activation
    return forward, backward


def worst(found, expected):
    """The largest relative error of 128 rows: a wrong tile shows."""
    pairs = zip(found.split(128), expected.split(128), strict=True)
    return max(error(a, b) for a, b in pairs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [512, 1000, 32768])
@pytest.mark.parametrize("activation", [quack.SWIGLU, quack.GELU])
def test_the_operations_give_plain_arithmetics_results(activation, tokens, shape):
    forward, backward = operands(activation, tokens, shape)
    results = *quack.activated_matmul(*forward), *quack.activation_backward_matmul(*backward)
    plain = *quack.plain_forward(*forward), *quack.plain_backward(*backward)
    for found, expected in zip(results, plain, strict=True):
        assert found.shape == expected.shape and found.dtype == torch.bfloat16
        assert worst(found, expected) < TOLERANCE


# --- a layer ---


@pytest.mark.parametrize("sums", [False, True], ids=["returned", "added to sums"])
@pytest.mark.parametrize("model", MODELS)
def test_a_layers_values_and_gradients_are_those_of_torch(model, sums):
    """It also fails if the two backends do not agree on the order of gate and up."""
    config = TrainConfig(**{**RUN, **MODELS[model], "n_embd": 1024, "d_ff": 3072}).model_config()
    x, dy = randn(2, 512, 1024), randn(2, 512, 1024)
    results = {}
    for backend in ("torch", "quack"):
        layer = FeedForward(config).cuda()
        if backend == "quack":
            layer.compute = quack.fused_feed_forward
        for linear in (layer.up, layer.down):
            linear.weight.data = randn(*linear.weight.shape, std=0.03)
            linear.weight_grad = torch.zeros(linear.weight.shape, device="cuda") if sums else None
        copied = x.clone().requires_grad_()
        y, _ = layer(Activation(copied))
        y.backward(dy)
        weights = [w.weight_grad if sums else w.weight.grad for w in (layer.up, layer.down)]
        results[backend] = [y, copied.grad, *weights]
    for found, usual in zip(results["quack"], results["torch"], strict=True):
        assert error(found, usual) < 1e-2


# --- runs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ffn")
    make_dataset(folder / "tokens", train_tokens=200_000)
    for name, keys in MODELS.items():
        write_config(folder / f"{name}.py", **{**RUN, **keys}, dataset=str(folder / "tokens"))
    return folder


def gradient_norms(record):
    return [row["gradients"]["global_norm"] for row in record["training_iterations"]]


@pytest.fixture(scope="module")
def by_torch(folder):
    return {model: train(folder, f"{model}-torch", config=f"{model}.py") for model in MODELS}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_those_of_torch(folder, by_torch, model, variant):
    out = f"{model}-{variant}"
    record = train(folder, out, "--ffn_backend=quack", *VARIANTS[variant], config=f"{model}.py")
    info = record["startup_info"]
    assert info["ffn_backend"]["used"] == "quack" and info["software"]["quack-kernels"]
    assert variant != "graphs" or info["cuda_graphs"]["used"] == "CUDA Graph", info["cuda_graphs"]
    usual = by_torch[model]
    assert losses(record)[0] == pytest.approx(losses(usual)[0], rel=1e-3)
    assert gradient_norms(record)[0] == pytest.approx(gradient_norms(usual)[0], rel=1e-2)
    assert losses(record) == pytest.approx(losses(usual), rel=2e-2)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_resumes_bit_for_bit(folder, model):
    for out, more in (("whole", []), ("parts", ["--max_iters=10"]), ("parts", ["--init_from=resume"])):
        train(folder, f"{model}-{out}", "--ffn_backend=quack", *more, config=f"{model}.py")
    last = "checkpoints/step-00000020"
    one, other = (checkpoint_tensors(folder / f"{model}-{out}" / last) for out in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one if not key.startswith("rng."))


@TWO_GPUS
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns_the_same(folder, by_torch, strategy):
    flags = ("--ffn_backend=quack", "--gradient_accumulation_steps=1", *STRATEGIES[strategy])
    record = train(folder, strategy, *flags, config="gated.py", processes=2)
    assert losses(record) == pytest.approx(losses(by_torch["gated"]), rel=2e-2)
