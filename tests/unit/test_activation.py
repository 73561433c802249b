"""What an operation hands to the next: whoever takes an Activation whose gradient's amax a layer in fp8 wants
finds that amax. Nobody's would be a 0, by which the layer would scale its gradient, in silence."""

import pytest
import torch
from support import fake_heads, fake_norm
from support.tensors import fp8_linear, random_bf16

from model import rotary_angles
from ops.activation import Activation, drop
from ops.float8_linear import Float8Linear
from ops.heads import split_heads
from ops.norm import AddNorm, RMSNorm
from ops.swiglu import SwiGLU

B, T, C, H, K, D = 2, 8, 32, 2, 1, 16
WIDTH = (H + 2 * K) * D
ROTARY = rotary_angles(T, D, 1e4)


def heads(activation, rotary, norms=(None, None)):
    return torch.cat(split_heads(activation, H, K, rotary, *norms), dim=2)


def normed(activation):
    x = random_bf16(B, T, WIDTH, std=0.5)
    norm = RMSNorm(WIDTH, 1e-6)
    norm.weight.data.fill_(1.5)
    total, after = norm.add(x, (activation.value, activation.gradient_amax))
    return total + after.value


def dropped(p):
    dropout = torch.nn.Dropout(p)

    def norm_of_dropped(activation):
        value, gradient_amax = drop((activation.value, activation.gradient_amax), dropout)
        return normed(Activation(value, gradient_amax=gradient_amax))

    return norm_of_dropped


def biased(activation):
    return activation._replace(bias=random_bf16(WIDTH))


TAKERS = {
    "an operation that looks for nothing": lambda activation: activation.plain() ** 2,
    "a norm": normed,
    "dropout of 0.5": dropped(0.5),
    "heads without positions": lambda activation: heads(activation, None),
    "heads without a kernel": lambda activation: heads(activation, ROTARY),
    "heads by a kernel": lambda activation: heads(activation, ROTARY),
    "heads by a kernel, which adds a bias": lambda activation: heads(biased(activation), ROTARY),
    "a pass that adds a bias": lambda activation: biased(activation).plain() ** 2,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_a_layer_gets_the_amax_of_its_gradient_whoever_takes_what_it_wrote(taker, monkeypatch):
    fake_norm.use(monkeypatch)
    if "by a kernel" in taker:
        fake_heads.use(monkeypatch)
    layer, x = fp8_linear(random_bf16(WIDTH, C, std=0.1)), random_bf16(B, T, C).requires_grad_()
    quantize, seen = Float8Linear.quantize_gradient, []

    def noted(self, dy, amax):
        seen.append((dy.abs().amax(), amax))
        return quantize(self, dy, amax)

    monkeypatch.setattr(Float8Linear, "quantize_gradient", noted)
    activation = layer.activation(x)
    assert activation.gradient_amax is not None
    TAKERS[taker](activation).sum().backward()
    ((largest, told),) = seen
    assert told.amax() == largest > 0


def test_compiled_code_has_the_gradients_of_the_functions_that_only_a_gpu_calls(monkeypatch):
    fake_norm.use(monkeypatch)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((T, C), (T, C), (), (C,), (C,))]

    def step(x, delta, gradient_amax, weight, bias):
        total, after, amax = AddNorm.apply(x, delta, gradient_amax, weight, bias, 1e-6, True)
        return (total + after).sum() + SwiGLU.apply(after).square().sum() * amax.amax()

    expected = torch.autograd.grad(step(*inputs), inputs)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
