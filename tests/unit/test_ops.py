"""The operations of ops/: plain forms against autograd on the CPU, Triton forms against them on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from model import RMSNorm, rotary_angles
from model_config import model_config
from ops.cross_entropy import LinearCrossEntropy, cross_entropy
from ops.embedding import EmbeddingFunction, add_embedding_gradient
from ops.heads import Rotary, split_heads
from ops.linear import LinearFunction, add_weight_gradient
from ops.rms_norm import add_rms_norm
from ops.swiglu import swiglu

N, C, V = 24, 16, 50
CONFIG = model_config("qwen3", n_layer=1, n_head=2, n_embd=32, vocab_size=64, block_size=64)


def random(*shape, device="cpu", dtype=torch.float32, std=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (std * torch.randn(*shape, generator=generator)).to(device, dtype)


def gradients(loss, *inputs):
    return torch.autograd.grad(loss, inputs)


def close(a, b, tolerance):
    error = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)
    assert error < tolerance, error


# --- plain forms ---


def test_a_linear_with_a_sum_adds_the_gradient_that_autograd_computes():
    x, weight, dy = random(3, 5, C).requires_grad_(), random(V, C).requires_grad_(), random(3, 5, V)
    dx, dweight = gradients((F.linear(x, weight) * dy).sum(), x, weight)
    total = torch.ones(V, C)
    y = LinearFunction.apply(x, weight, total)
    torch.testing.assert_close(y, F.linear(x, weight))
    (y * dy).sum().backward()
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(total, dweight + 1)
    assert weight.grad is None


def test_bf16_gradients_are_summed_without_being_rounded_to_bf16():
    dy, x = random(256, 8, dtype=torch.bfloat16), random(256, 4, dtype=torch.bfloat16)
    total = torch.zeros(8, 4)
    add_weight_gradient(dy, x, total)
    torch.testing.assert_close(total, dy.float().t() @ x.float())


def test_an_embedding_with_a_sum_adds_the_gradient_that_autograd_computes():
    ids, weight, dy = torch.tensor([[1, 4, 1], [0, 1, 4]]), random(6, C).requires_grad_(), random(2, 3, C)
    (dweight,) = gradients((F.embedding(ids, weight) * dy).sum(), weight)
    total = torch.zeros(6, C)
    (EmbeddingFunction.apply(ids, weight, total) * dy).sum().backward()
    torch.testing.assert_close(total, dweight)


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("into_sum", [True, False])
def test_the_loss_and_its_gradients_are_those_of_cross_entropy_in_any_number_of_chunks(chunks, into_sum):
    x, weight = random(N, C).requires_grad_(), random(V, C).requires_grad_()
    targets = torch.arange(N) % V
    targets[[2, 9]] = -100  # not counted, as in F.cross_entropy
    expected = F.cross_entropy(F.linear(x, weight), targets)
    dx, dweight = gradients(3 * expected, x, weight)
    total = torch.zeros(V, C) if into_sum else None
    loss = LinearCrossEntropy.apply(x, weight, targets, total, None, chunks, True)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(total if into_sum else weight.grad, dweight)


def test_a_loss_scale_that_bf16_cannot_hold_scales_the_gradient_exactly():
    """1/45056 (22 sequences of 2048) in bf16 is 0.2 % off, for every gradient below the head alike."""
    weight, targets = random(V, C, dtype=torch.bfloat16), torch.arange(N) % V
    norms = []
    for scale in (1 / 32768, 1 / 45056):
        x = random(N, C, dtype=torch.bfloat16).requires_grad_()
        loss = LinearCrossEntropy.apply(x, weight, targets, torch.zeros(V, C), None, 1, True)
        (loss * torch.tensor(scale * N)).backward()
        norms.append(x.grad.double().norm().item())
    assert norms[1] / norms[0] == pytest.approx(32768 / 45056, rel=3e-4)


# --- kernels ---


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5, 2 * 64), (2, 7, 2 * 1000), (1, 300, 2 * 6144)])
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


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", [(16, 8, 128), (18, 18, 128), (3, 1, 32)])
def test_the_heads_kernel_equals_its_plain_form(heads, norm):
    H, K, D = heads
    B, T = 3, 67
    rotary = rotary_angles(T, D, 1e4)
    qkv = random(B, T, (H + 2 * K) * D)
    norms = [RMSNorm(D, CONFIG) if norm else None for _ in range(2)]
    for i, module in enumerate(norms):
        if module:
            module.weight.data = 1 + 0.3 * random(D, std=1.0 + i)
    outputs = [random(B, T, heads, D) for heads in (H, K, K)]

    def run(device, dtype):
        x = qkv.to(device, dtype).requires_grad_()
        moved = [module.to(device) if module else None for module in norms]
        weights = [module.weight for module in moved if module]
        parts = split_heads(x, H, K, Rotary(*(t.to(device) for t in rotary)), *moved)
        loss = sum((p * o.to(device, dtype)).float().sum() for p, o in zip(parts, outputs, strict=True))
        return [t.cpu() for t in (*parts, *gradients(loss, x, *weights))]

    qkv = qkv.bfloat16().float()
    outputs = [o.bfloat16().float() for o in outputs]
    plain = run("cpu", torch.float32)
    for exact, bf16, reference in zip(
        run("cuda", torch.float32), run("cuda", torch.bfloat16), plain, strict=True
    ):
        assert exact.shape == reference.shape
        close(exact, reference, 1e-5)
        close(bf16, reference, 5e-3)


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_weight_gradients_are_summed_in_fp32_by_the_matmul():
    dy, x = random(512, 256, dtype=torch.bfloat16), random(512, 128, dtype=torch.bfloat16)
    total = random(256, 128)
    expected = total + dy.float().t() @ x.float()
    summed = total.cuda()
    add_weight_gradient(dy.cuda(), x.cuda(), summed)
    torch.testing.assert_close(summed.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("C", [64, 2048, 2304])
def test_the_residual_norm_kernel_equals_its_plain_form(C):
    x, delta, weight = random(5, 133, C), random(5, 133, C, std=0.5), 1 + 0.3 * random(C)
    dtotal, dnormed = random(5, 133, C, std=2.0), random(5, 133, C, std=3.0)

    def run(device, dtype):
        start = [t.to(device, dtype).requires_grad_() for t in (x, delta)]
        w = weight.to(device).requires_grad_()
        total, normed, amax = add_rms_norm(*start, w, 1e-6)
        if amax is not None:
            assert amax.amax() == normed.abs().amax()
        loss = (total * dtotal.to(device, dtype)).sum() + (normed * dnormed.to(device, dtype)).sum()
        return [t.float().cpu() for t in (total, normed, *gradients(loss, *start, w))]

    x, delta, dtotal, dnormed = (t.bfloat16().float() for t in (x, delta, dtotal, dnormed))
    plain = run("cpu", torch.float32)
    for exact, bf16, reference in zip(
        run("cuda", torch.float32), run("cuda", torch.bfloat16), plain, strict=True
    ):
        close(exact, reference, 1e-5)
        close(bf16, reference, 8e-3)


@pytest.mark.gpu
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
