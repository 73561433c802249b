"""The Triton forms of ops/ against their plain forms."""

import pytest
import torch
from support.tensors import CONFIG, close, gradients, random

from model import rotary_angles
from ops.activation import Activation
from ops.embedding import add_embedding_gradient
from ops.heads import Rotary, split_heads
from ops.linear import add_weight_gradient
from ops.losses import cross_entropy
from ops.norm import Norm, RMSNorm, add_norm
from ops.swiglu import swiglu

pytestmark = pytest.mark.gpu


def assert_close_in_fp32_and_bf16(run, tolerance):
    """run(device, dtype): on a GPU against fp32 on the CPU; the tolerance is that of bf16."""
    reference = run("cpu", torch.float32)
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, tolerance)):
        for found, expected in zip(run("cuda", dtype), reference, strict=True):
            assert found.shape == expected.shape
            close(found, expected, allowed)


@pytest.mark.parametrize("shape", [(3, 5, 2 * 64), (2, 7, 2 * 1000), (1, 3, 2 * 2049), (1, 300, 2 * 6144)])
def test_the_swiglu_kernel_equals_its_plain_form(shape):
    x = random(*shape, dtype=torch.bfloat16)
    dh = random(*shape[:-1], shape[-1] // 2, dtype=torch.bfloat16)
    plain = x.float().requires_grad_()
    h = swiglu(plain)
    (dx,) = gradients((h * dh.float()).sum(), plain)
    x = x.cuda().requires_grad_()
    fused = swiglu(x)
    (dfused,) = gradients((fused * dh.cuda()).sum(), x)
    close(fused.cpu(), h, 3e-3)
    close(dfused.cpu(), dx, 3e-3)


@pytest.mark.parametrize("weights", ["norms", "bias", "none"])
@pytest.mark.parametrize(
    "heads", [(16, 8, 128), (18, 18, 128), (25, 5, 64), (40, 8, 128), (3, 1, 32), (5, 1, 80)]
)
def test_the_heads_kernel_equals_its_plain_form(heads, weights):
    H, K, D = heads
    B, T = 3, 67
    rotary = rotary_angles(T, D, 1e4)
    qkv = random(B, T, (H + 2 * K) * D)
    norms = [RMSNorm(D, CONFIG.norm_eps) if weights == "norms" else None for _ in range(2)]
    bias = random(qkv.shape[-1]).bfloat16().float() if weights == "bias" else None
    for i, module in enumerate(norms):
        if module:
            module.weight.data = 1 + 0.3 * random(D, std=1.0 + i)
    outputs = [random(B, T, heads, D) for heads in (H, K, K)]

    def run(device, dtype):
        x = qkv.to(device, dtype).requires_grad_()
        moved = [module.to(device) if module else None for module in norms]
        added = None if bias is None else bias.to(device, dtype).requires_grad_()
        learned = [module.weight for module in moved if module] + [added] * (weights == "bias")
        turned = Rotary(*(t.to(device) for t in rotary))
        parts = split_heads(Activation(x, bias=added), H, K, turned, *moved)
        loss = sum((p * o.to(device, dtype)).float().sum() for p, o in zip(parts, outputs, strict=True))
        return [t.cpu() for t in (*parts, *gradients(loss, x, *learned))]

    qkv = qkv.bfloat16().float()
    outputs = [o.bfloat16().float() for o in outputs]
    assert_close_in_fp32_and_bf16(run, 5e-3)


@pytest.mark.parametrize("V", [65, 50304, 151936])
def test_the_cross_entropy_kernel_equals_its_plain_form(V):
    logits = 4 * random(40, V)
    targets = torch.arange(40) * (V // 41)
    targets[3] = -100
    fused = logits.cuda()
    untouched = logits.cuda()
    expected = cross_entropy(logits, targets, True)
    losses = cross_entropy(fused, targets.cuda(), True)
    torch.testing.assert_close(losses.cpu(), expected, rtol=1e-5, atol=1e-5)
    close(fused.cpu(), logits, 1e-5)
    before = untouched.clone()
    losses = cross_entropy(untouched, targets.cuda(), False)
    torch.testing.assert_close(losses.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(untouched, before)


def test_weight_gradients_are_summed_in_fp32_by_the_matmul():
    dy, x = random(512, 256, dtype=torch.bfloat16), random(512, 128, dtype=torch.bfloat16)
    total = random(256, 128)
    expected = total + dy.float().t() @ x.float()
    summed = total.cuda()
    add_weight_gradient(dy.cuda(), x.cuda(), summed)
    torch.testing.assert_close(summed.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("C", [64, 2048, 2304, 5120])
@pytest.mark.parametrize("centered, bias", [(False, False), (True, False), (True, True)])
def test_the_residual_norm_kernel_equals_its_plain_form(C, centered, bias):
    x, delta, weight = 0.5 + random(5, 133, C), random(5, 133, C, std=0.5), 1 + 0.3 * random(C)
    dtotal, dnormed, shift = random(5, 133, C, std=2.0), random(5, 133, C, std=3.0), random(C)

    def run(device, dtype):
        start = [t.to(device, dtype).requires_grad_() for t in (x, delta)]
        weights = [t.to(device).requires_grad_() for t in (weight, shift)[: 1 + bias]]
        norm = Norm(weights[0], weights[1] if bias else None, 1e-6, centered)
        handed = torch.empty((), device=device, requires_grad=True) if device == "cuda" else None
        total, (normed, amax, *_) = add_norm(start[0], (start[1], handed), norm)
        loss = (total * dtotal.to(device, dtype)).sum() + (normed * dnormed.to(device, dtype)).sum()
        if handed is None:
            found = gradients(loss, *start, *weights)
        else:
            *found, gradient_amax = gradients(loss, *start, *weights, handed)
            assert amax.amax() == normed.abs().amax()
            assert gradient_amax == found[1].abs().amax()
        return [t.float().cpu() for t in (total, normed, *found)]

    x, delta, dtotal, dnormed = (t.bfloat16().float() for t in (x, delta, dtotal, dnormed))
    assert_close_in_fp32_and_bf16(run, 8e-3)


@pytest.mark.parametrize("C", [48, 2048])
def test_embedding_gradients_are_summed_in_one_order_for_rare_and_frequent_tokens(C):
    ids = torch.randint(0, 90, (4000,), generator=torch.Generator().manual_seed(0))
    ids[::3] = 7
    dy, start = random(4000, C, dtype=torch.bfloat16), random(100, C)
    expected = start.double().index_add(0, ids, dy.double())
    totals = []
    for _ in range(2):
        totals.append(start.cuda())
        add_embedding_gradient(ids.cuda(), dy.cuda(), totals[-1])
    assert torch.equal(*totals)
    close(totals[0].cpu(), expected, 1e-6)
