"""The fp8 kernels against their plain forms."""

import pytest
import torch
from support import fake_norm
from support.all_recipes import use_recipe_in
from support.tensors import (
    E4M3,
    E5M2,
    assert_requantized_as_each_alone,
    error,
    fp8_linear,
    random_bf16,
)

from model import Block, rotary_angles
from model_config import model_config
from ops import float8
from ops.activation import Activation, no_delta
from ops.heads import Rotary, split_heads
from ops.losses import cross_entropy, cross_entropy_float8
from ops.norm import RMSNorm
from ops.swiglu import swiglu_backward, swiglu_backward_float8, swiglu_with_amax
from training.hardware.attention_kernels import _sdpa_default

pytestmark = pytest.mark.gpu


def same_bits(a, b):
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 64), (300, 6144), (301, 96), (2048, 2080)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_cast_kernel_gives_the_bits_of_the_plain_form(shape, dtype):
    x = random_bf16(*shape, std=3.0)
    plain, fused = float8.quantize(x, dtype), float8.quantize(x.cuda(), dtype)
    assert fused.inverse_scale.item() == plain.inverse_scale.item()
    for a, b in zip(fused[:2], plain[:2], strict=True):
        assert same_bits(a, b)


def test_weights_that_are_quantized_together_have_scales_of_their_own():
    assert_requantized_as_each_alone("cuda")


@pytest.mark.parametrize("shape", [(64, 48), (272, 1056), (2048, 50304)])
def test_the_loss_writes_the_bits_that_a_cast_of_its_gradient_gives(shape):
    logits = random_bf16(*shape, std=3.0, device="cuda")
    targets = torch.randint(0, shape[1], shape[:1], device="cuda")
    targets[::5] = -1  # not counted
    losses, fused = cross_entropy_float8(logits.clone(), targets, E5M2)
    assert torch.equal(losses, cross_entropy(logits, targets, True))
    apart = float8.quantize(logits, E5M2, torch.ones((), device="cuda"))  # by now, they are their gradient
    assert fused.inverse_scale == apart.inverse_scale
    assert same_bits(fused.rows, apart.rows)
    assert same_bits(fused.columns, apart.columns)


SWIGLU_SHAPES = [(128, 64), (272, 1056), (64, 6144)]


@pytest.mark.parametrize("shape", SWIGLU_SHAPES)
def test_the_swiglu_kernel_knows_the_largest_magnitude_of_what_it_writes(shape):
    x = random_bf16(shape[0], 2 * shape[1])
    h, amax = swiglu_with_amax(x.cuda())
    plain, plain_amax = swiglu_with_amax(x)
    assert error(h.cpu(), plain) < 3e-3
    assert amax.shape == plain_amax.shape
    assert amax.amax() == h.abs().amax()


@pytest.mark.parametrize("shape", SWIGLU_SHAPES)
def test_the_backward_of_swiglu_in_fp8_has_the_bits_of_a_cast_of_the_one_in_bf16(shape):
    M, F_ = shape
    x, dh = random_bf16(M, 2 * F_), random_bf16(M, F_)
    dx = swiglu_backward(x.cuda(), dh.cuda())
    assert error(dx.cpu(), swiglu_backward(x, dh)) < 3e-3
    fused, apart = swiglu_backward_float8(x.cuda(), dh.cuda(), E5M2), float8.quantize(dx, E5M2)
    assert fused.inverse_scale == apart.inverse_scale
    assert same_bits(fused.rows, apart.rows)
    assert same_bits(fused.columns, apart.columns)


@pytest.mark.parametrize("norm", [True, False])
def test_an_fp8_linear_gets_the_amax_of_its_gradient_from_the_heads_kernel(norm):
    B, T, C, H, K, D = 2, 64, 96, 4, 2, 32
    layer = fp8_linear(random_bf16((H + 2 * K) * D, C, std=0.1, device="cuda"))
    norms = [RMSNorm(D, 1e-6).cuda() if norm else None for _ in "qk"]
    for module in filter(None, norms):
        module.weight.data = 1 + 0.3 * random_bf16(D, device="cuda").float()
    rotary = Rotary(*(t.cuda() for t in rotary_angles(T, D, 1e4)))
    outputs = [random_bf16(B, T, heads, D, device="cuda") for heads in (H, K, K)]

    def run(function):
        x = random_bf16(B, T, C, device="cuda").requires_grad_()
        layer.weight_grad = torch.zeros(layer.weight.shape, device="cuda")
        parts = function(x)
        loss = sum((p * o).float().sum() for p, o in zip(parts, outputs, strict=True))
        leaves = [x, *(module.weight for module in norms if module)]
        return [*parts, *torch.autograd.grad(loss, leaves), layer.weight_grad]

    handed = run(lambda x: split_heads(layer.activation(x), H, K, rotary, *norms))
    found = run(lambda x: split_heads(Activation(layer(x)), H, K, rotary, *norms))
    for a, b in zip(handed, found, strict=True):
        assert error(a, b) < 1e-6


def test_an_fp8_matmul_equals_its_plain_form():
    a, b = float8.quantize(random_bf16(256, 128), E5M2), float8.quantize(random_bf16(64, 128), E4M3)
    plain = float8.matmul(a.rows, b.rows, a.inverse_scale, b.inverse_scale)
    moved = [t.cuda() for t in (a.rows, b.rows, a.inverse_scale, b.inverse_scale)]
    assert error(float8.matmul(*moved).cpu(), plain) < 4e-3


def test_a_norms_backward_hands_on_the_amax_that_a_pass_over_the_gradient_finds(monkeypatch):
    """Two blocks in fp8 give the same bits with and without it, eager and compiled. Attention is SDPA's:
    torch.compile chooses by time how to sum a softmax of its own, and another order gives other bits."""
    config = model_config("qwen3", n_layer=1, n_head=4, n_embd=256, d_ff=512, vocab_size=96, block_size=64)
    blocks = [Block(config, _sdpa_default).cuda() for _ in range(2)]
    for index, (name, parameter) in enumerate(
        (n, p) for block in blocks for n, p in block.named_parameters()
    ):
        generator = torch.Generator("cuda").manual_seed(index)
        torch.nn.init.normal_(parameter, float("norm" in name), 0.05, generator=generator)
    for block in blocks:
        use_recipe_in(block, "fp8_tensorwise")
    rotary = rotary_angles(64, config.head_dim, 1e4, "cuda")
    x, above = (random_bf16(2, 64, 256, device="cuda", std=std) for std in (1.0, 0.01))

    def results(hands: bool, wrap=lambda module: module):
        fake_norm.let_layers_ask(monkeypatch, *blocks, layers_tell=hands)
        start = x.clone().requires_grad_()
        total, delta = start, no_delta(start)
        for block in blocks:
            total, delta = wrap(block)(total, delta, rotary)
            assert (delta[1] is not None) == hands
        final = blocks[0].attn_norm.add(total, delta)[0]
        parameters = [p for block in blocks for p in block.parameters()]
        return [final, *torch.autograd.grad(final, [start, *parameters], above)]

    def compiled(module):
        return torch.compile(module, fullgraph=True, dynamic=False)

    for wrap in (lambda module: module, compiled):
        for a, b in zip(results(True, wrap), results(False, wrap), strict=True):
            assert torch.equal(a, b)
