"""On a GPU: the levels memory_bound and attention of activation_checkpointing against no recomputation."""

import pytest
import torch
from support.gpu_runs import needs_fp8
from support.tensors import close

from model import manual_attention
from model_builder import build_model
from ops.linear import Linear, refresh_weights
from training.configuration.keys import TrainConfig
from training.hardware.attention_kernels import choose_attention
from training.optimization.compile import compile_and_checkpoint
from training.optimization.low_precision import use_recipe as use_low_precision

pytestmark = pytest.mark.gpu

LEVELS = ("memory_bound", "attention")
B, T = 4, 512
SIZES = {"n_layer": 3, "n_head": 8, "n_embd": 512, "d_ff": 1536, "vocab_size": 1024, "block_size": T}
LLAMA = {"arch_preset": "llama", "num_key_value_heads": 4}
MODELS = {
    "gpt2": {"arch_preset": "gpt2", "bias": True},
    "llama": LLAMA,
    "llama, plain heads": {**LLAMA, "head_dim": 48},
    "qwen3": {"arch_preset": "qwen3", "num_key_value_heads": 4},
    "qwen3, documents": {"arch_preset": "qwen3", "num_key_value_heads": 4, "doc_masking": True},
    "qwen3, fp8": {"arch_preset": "qwen3", "num_key_value_heads": 4, "low_precision": "fp8_tensorwise"},
}


@pytest.mark.parametrize("width", [1000, 2048, 6144])
def test_the_kernels_make_the_bits_of_the_forward_again(width):
    from support.recomputed_inputs import assert_the_norm_is_the_forwards, assert_the_product_is_the_forwards

    assert_the_product_is_the_forwards((300, width), "cuda", 2048)
    assert_the_norm_is_the_forwards((300, width), "cuda")


def built(kind: str, level: str, compiled: bool, dtype: torch.dtype, **changed):
    """A model of one kind of MODELS, and its settings."""
    name = str(dtype).removeprefix("torch.")
    keys = {**SIZES, **MODELS[kind], "dtype": name, "compile": compiled, **changed}
    config = TrainConfig(batch_size=B, activation_checkpointing=level, **keys)
    device = torch.device("cuda")
    shape = config.model_config()
    attention = choose_attention("sdpa", shape, dtype, device, manual_attention, config.doc_masking)
    model = build_model(shape, attention.attend, dtype).init_weights(device, seed=0)
    model.documents = attention.documents()
    return model.to(dtype).train(), config


def results(kind: str, level: str, compiled: bool, fused: bool, **changed):
    """The losses of two micro-steps, and the sums of every gradient."""
    model, config = built(kind, level, compiled, torch.bfloat16, **changed)
    use_low_precision(model, config)
    refresh_weights(model)
    for layer in model.modules():
        if isinstance(layer, Linear) and fused:
            layer.weight_grad = torch.zeros(layer.weight.shape, device="cuda")
    torch._dynamo.reset()
    compile_and_checkpoint(model, config)
    torch.manual_seed(1)
    losses = []
    for i in range(2):
        ids = torch.arange(B * T, device="cuda").view(B, T).mul(7 + i) % 1000
        loss = model(ids, ids.roll(1, 1))
        loss.backward()
        losses.append(loss.item())
    sums = {n: m.weight_grad for n, m in model.named_modules() if getattr(m, "weight_grad", None) is not None}
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | sums


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_without_recomputation(kind, compiled, fused):
    """Losses to the last bit. An attention kernel may sum its gradients in any order, so gradients may differ
    where two runs without recomputation differ."""
    if "fp8" in kind:
        needs_fp8()
    first, second = (results(kind, "none", compiled, fused) for _ in range(2))
    for level in LEVELS:
        losses, gradients = results(kind, level, compiled, fused)
        assert losses == first[0]
        for name, gradient in first[1].items():
            if torch.equal(gradient, second[1][name]):
                assert torch.equal(gradients[name], gradient), (level, name)
            else:
                close(gradients[name], gradient, 0.01)


def test_the_masks_of_dropout_are_drawn_again():
    expected = results("qwen3", "none", False, True, dropout=0.1)
    for level in LEVELS:
        losses, gradients = results("qwen3", level, False, True, dropout=0.1)
        assert losses == expected[0]
        for name, gradient in expected[1].items():
            close(gradients[name], gradient, 0.01)


def loss_along_the_gradient(level: str) -> float:
    """What a short step against the gradient takes from the loss, of what the gradient promises."""
    model, config = built("qwen3", level, True, torch.float32, dropout=0.5, n_layer=2)
    torch._dynamo.reset()
    compile_and_checkpoint(model, config)
    ids = torch.arange(B * T, device="cuda").view(B, T).mul(7) % 1000

    def loss():
        torch.manual_seed(1)
        return model(ids, ids.roll(1, 1))

    before = loss()
    before.backward()
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    length = sum(weight.grad.double().square().sum().item() for weight in weights)
    step = 0.01 / length
    with torch.no_grad():
        for weight in weights:
            weight -= step * weight.grad
    return (before.item() - loss().item()) / 0.01


def test_compiled_dropout_has_the_masks_of_its_forward():
    """torch.compile draws other masks for another graph, so losses differ between the levels."""
    usual = loss_along_the_gradient("none")
    assert usual == pytest.approx(1.0, abs=0.1)
    for level in LEVELS:
        assert loss_along_the_gradient(level) == pytest.approx(usual, abs=0.05)
