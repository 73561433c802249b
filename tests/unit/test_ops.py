"""The operations of ops/: plain forms against autograd on the CPU, Triton forms against them on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from support.tensors import gradients, random

from common.errors import UserError
from ops.cross_entropy import GradientScale, LinearCrossEntropy
from ops.embedding import EmbeddingFunction
from ops.linear import Linear, LinearFunction, add_weight_gradient
from ops.swiglu import AMAX_COLUMNS, SwiGLU, pairs, swiglu, swiglu_backward, swiglu_with_amax

N, C, V = 24, 16, 50


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
    weight, targets = random(V, C, dtype=torch.bfloat16), torch.arange(N) % V
    norms = []
    for scale in (1 / 32768, 1 / 45056):
        x = random(N, C, dtype=torch.bfloat16).requires_grad_()
        factor = torch.tensor(scale * N)
        given = GradientScale(factor) if scale_is_known else None
        head = head_of(weight, torch.zeros(V, C))
        loss = LinearCrossEntropy.apply(x, weight, targets, head, 1, True, given)
        (loss * factor).backward()
        norms.append(x.grad.double().norm().item())
    assert norms[1] / norms[0] == pytest.approx(32768 / 45056, rel=3e-4)
