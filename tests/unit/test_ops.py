"""The operations of ops/, in plain forms, against autograd; the heads, around stand-ins for their kernels;
and what an operation hands to the next. Triton forms need a GPU (tests/gpu)."""

import pytest
import torch
import torch.nn.functional as F
from support import fake_heads, fake_norm
from support.tensors import CONFIG, close, fp8_linear, gradients, random, random_bf16

from common.errors import UserError
from model import rotary_angles
from ops.activation import Activation, drop
from ops.cross_entropy import GradientScale, LinearCrossEntropy
from ops.embedding import EmbeddingFunction
from ops.float8_linear import Float8Linear
from ops.heads import split_heads
from ops.linear import Linear, LinearFunction, add_weight_gradient
from ops.norm import AddNorm, RMSNorm
from ops.swiglu import AMAX_COLUMNS, SwiGLU, pairs, swiglu, swiglu_backward, swiglu_with_amax

N, V = 24, 50
B, T, C, H, K, D = 2, 8, 32, 4, 2, 16
WIDTH, ROTARY = (H + 2 * K) * D, rotary_angles(T, D, 1e4)


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
    # without being rounded to bf16
    dy, x, total = random_bf16(256, 8), random_bf16(256, 4), torch.zeros(8, 4)
    add_weight_gradient(dy, x, total)
    torch.testing.assert_close(total, dy.float().t() @ x.float())


def test_an_embedding_with_a_sum_adds_the_gradient_that_autograd_computes():
    ids, weight, dy = torch.tensor([[1, 4, 1], [0, 1, 4]]), random(6, C).requires_grad_(), random(2, 3, C)
    (dweight,) = gradients((F.embedding(ids, weight) * dy).sum(), weight)
    total = torch.zeros(6, C)
    (EmbeddingFunction.apply(ids, weight, total) * dy).sum().backward()
    torch.testing.assert_close(total, dweight)


def test_swiglu_takes_its_columns_in_pairs_and_so_are_those_of_its_gradient():
    x, dh = random(N, 2 * V).requires_grad_(), random(N, V)
    gate, up = x[:, 0::2], x[:, 1::2]
    assert all(map(torch.equal, pairs(x), (gate, up)))
    expected = F.silu(gate) * up
    (dx,) = gradients((expected * dh).sum(), x)
    torch.testing.assert_close(swiglu(x), expected)
    h, amax = swiglu_with_amax(x.detach())
    torch.testing.assert_close(h, expected)
    assert amax.shape == (N, 1) and AMAX_COLUMNS > V
    assert torch.equal(amax[:, 0], h.abs().amax(-1))
    torch.testing.assert_close(swiglu_backward(x.detach(), dh), dx)
    for loss in ((swiglu(x) * dh).sum(), (SwiGLU.apply(x) * dh).sum()):
        torch.testing.assert_close(gradients(loss, x)[0], dx)


def head_of(weight, total):
    head = Linear(C, V, bias=False, device="meta")
    head.weight, head.weight_grad = torch.nn.Parameter(weight.detach()), total
    return head


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("into_sum", [True, False])
@pytest.mark.parametrize("scale_is_known", [True, False])
def test_the_loss_and_its_gradients_are_those_of_cross_entropy_in_any_number_of_chunks(
    chunks, into_sum, scale_is_known
):
    x, weight = random(N, C).requires_grad_(), random(V, C).requires_grad_()
    targets = torch.arange(N) % V
    targets[[2, 9]] = -100  # not counted, as in F.cross_entropy
    expected = F.cross_entropy(F.linear(x, weight), targets)
    dx, dweight = gradients(3 * expected, x, weight)
    head = head_of(weight, torch.zeros(V, C) if into_sum else None)
    scale = GradientScale(torch.tensor(3.0)) if scale_is_known else None
    loss = LinearCrossEntropy.apply(x, weight, targets, head, chunks, True, scale)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    torch.testing.assert_close(x.grad, dx)
    torch.testing.assert_close(head.weight_grad if into_sum else weight.grad, dweight)


def test_a_multiple_of_a_loss_whose_gradient_scale_is_known_has_no_gradients_that_train():
    """The weight's gradient was summed without the factor, so nothing may be updated."""
    x, weight = random(N, C).requires_grad_(), random(V, C)
    arguments = torch.arange(N) % V, head_of(weight, torch.zeros(V, C)), 1, True
    (2 * LinearCrossEntropy.apply(x, weight, *arguments, GradientScale(torch.tensor(1.0)))).backward()
    assert x.grad.isnan().all()
    with pytest.raises(UserError, match="leave out the argument gradient_scale"):
        known = GradientScale(torch.tensor(1.0), checks=True)
        (2 * LinearCrossEntropy.apply(x, weight, *arguments, known)).backward()


@pytest.mark.parametrize("scale_is_known", [True, False])
def test_a_loss_scale_that_bf16_cannot_hold_scales_the_gradient_exactly(scale_is_known):
    """1/45056 (22 sequences of 2048) in bf16 is 0.2 % off, for every gradient below the head alike."""
    weight, targets, norms = random_bf16(V, C), torch.arange(N) % V, []
    for scale in (1 / 32768, 1 / 45056):
        x, factor = random_bf16(N, C).requires_grad_(), torch.tensor(scale * N)
        given = GradientScale(factor) if scale_is_known else None
        head = head_of(weight, torch.zeros(V, C))
        (LinearCrossEntropy.apply(x, weight, targets, head, 1, True, given) * factor).backward()
        norms.append(x.grad.double().norm().item())
    assert norms[1] / norms[0] == pytest.approx(32768 / 45056, rel=3e-4)


# --- heads ---

NORMED = pytest.mark.parametrize("normed", [True, False])


def norms(normed):
    made = [RMSNorm(D, CONFIG.norm_eps) if normed else None for _ in "qk"]
    for i, norm in enumerate(made):
        if norm is not None:
            norm.weight.data = 1 + 0.3 * random(D, std=1.0 + i)
    return made


def results(function, x, normed, biased):
    """q, k, v, and the gradients of x, of the norms' weights and of the bias."""
    x, used = x.clone().requires_grad_(), norms(normed)
    bias = random(x.shape[-1]).requires_grad_() if biased else None
    parts = function(Activation(x, bias=bias), H, K, ROTARY, *used)
    loss = sum((part * random(B, T, n, D)).sum() for part, n in zip(parts, (H, K, K), strict=True))
    learned = [norm.weight for norm in used if norm is not None] + [bias] * biased
    return [*parts, *gradients(loss, x, *learned)]


@NORMED
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_heads_by_kernels_have_the_values_and_gradients_of_plain_heads(monkeypatch, normed, biased, compiled):
    qkv = random(B, T, WIDTH)
    expected = results(split_heads, qkv, normed, biased)
    fake_heads.use(monkeypatch)
    split = torch.compile(split_heads, backend="aot_eager", fullgraph=True) if compiled else split_heads
    for got, value in zip(results(split, qkv, normed, biased), expected, strict=True):
        close(got, value, 1e-6)


@NORMED
def test_v_is_a_part_of_qkv_where_norms_keep_qkv_and_else_nothing_keeps_qkv(monkeypatch, normed):
    fake_heads.use(monkeypatch)
    qkv = random(B, T, WIDTH).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        q, k, v = split_heads(Activation(qkv), H, K, ROTARY, *norms(normed))
    kept = {tensor.untyped_storage().data_ptr() for tensor in [*saved, q, k, v]}
    assert (qkv.untyped_storage().data_ptr() in kept) == normed
    assert torch.equal(v.flatten(2), qkv[..., (H + K) * D :])
    assert v.is_contiguous() != normed


# --- whoever takes an Activation whose gradient's amax a layer in fp8 wants, finds that amax; nobody's would
# be a 0, by which the layer would scale its gradient, in silence ---


def heads(activation, rotary, norms=(None, None)):
    return torch.cat(split_heads(activation, H, K, rotary, *norms), dim=2)


def normed(activation, dropout):
    x, norm = random_bf16(B, T, WIDTH, std=0.5), RMSNorm(WIDTH, 1e-6)
    norm.weight.data.fill_(1.5)
    total, after = norm.add(x, drop((activation.value, activation.gradient_amax), dropout))
    return total + after.value


def biased(activation):
    return activation._replace(bias=random_bf16(WIDTH))


TAKERS = {
    "an operation that looks for nothing": lambda activation: activation.plain() ** 2,
    "a norm": lambda activation: normed(activation, torch.nn.Dropout(0.0)),
    "dropout of 0.5": lambda activation: normed(activation, torch.nn.Dropout(0.5)),
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
