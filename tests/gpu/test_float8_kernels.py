"""The fp8 kernels against their plain forms."""

import pytest
import torch
from support.tensors import E4M3, E5M2, error, fp8_linear, random_bf16

from model import rotary_angles
from ops import float8
from ops.heads import Float8Heads, HeadLayout, Rotary, SplitHeads
from ops.swiglu import swiglu_backward, swiglu_with_amax

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(128, 64), (300, 6144), (2048, 2080)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_cast_kernel_gives_the_bits_of_the_plain_form(shape, dtype):
    x = random_bf16(*shape, std=3.0)
    plain, fused = float8.quantize(x, dtype), float8.quantize(x.cuda(), dtype)
    assert fused.inverse_scale.item() == plain.inverse_scale.item()
    for a, b in zip(fused[:2], plain[:2], strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 64), (272, 1056), (64, 6144)])
def test_the_swiglu_kernels_know_the_largest_magnitude_of_what_they_write(shape):
    M, F_ = shape
    g, dh = random_bf16(M, 2 * F_), random_bf16(M, F_)
    for function, inputs in ((swiglu_with_amax, (g,)), (swiglu_backward, (g, dh))):
        written, amax = function(*(t.cuda() for t in inputs))
        plain, plain_amax = function(*inputs)
        assert error(written.cpu(), plain) < 3e-3
        assert amax.shape == plain_amax.shape
        assert amax.amax() == written.abs().amax()


@pytest.mark.parametrize("norm", [True, False])
def test_fused_fp8_heads_equal_an_fp8_linear_and_the_heads_kernel(norm):
    B, T, C, H, K, D = 2, 64, 96, 4, 2, 32
    layer = fp8_linear(random_bf16((H + 2 * K) * D, C, std=0.1, device="cuda"))
    norms = [
        torch.nn.Parameter(1 + 0.3 * random_bf16(D, device="cuda").float()) if norm else None for _ in "qk"
    ]
    rotary = Rotary(*(t.cuda() for t in rotary_angles(T, D, 1e4)))
    outputs = [random_bf16(B, T, heads, D, device="cuda") for heads in (H, K, K)]

    def run(function):
        x = random_bf16(B, T, C, device="cuda").requires_grad_()
        layer.weight_grad = torch.zeros(layer.weight.shape, device="cuda")
        parts = function(x)
        loss = sum((p * o).float().sum() for p, o in zip(parts, outputs, strict=True))
        leaves = [x, *(n for n in norms if n is not None)]
        return [*parts, *torch.autograd.grad(loss, leaves), layer.weight_grad]

    layout = HeadLayout(H, K, rotary, 1e-6 if norm else 0.0)
    fused = run(lambda x: Float8Heads.apply(x, None, *layer.float8_arguments, *norms, layout))
    apart = run(lambda x: SplitHeads.apply(layer(x), *norms, layout))
    for a, b in zip(fused, apart, strict=True):
        assert error(a, b) < 1e-6


def test_an_fp8_matmul_equals_its_plain_form():
    a, b = float8.quantize(random_bf16(256, 128), E5M2), float8.quantize(random_bf16(64, 128), E4M3)
    plain = float8.matmul(a.values, b.values, a.inverse_scale, b.inverse_scale)
    moved = [t.cuda() for t in (a.values, b.values, a.inverse_scale, b.inverse_scale)]
    assert error(float8.matmul(*moved).cpu(), plain) < 4e-3
