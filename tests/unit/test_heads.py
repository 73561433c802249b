"""What the functions around the heads' kernels compute and keep. The kernels need a GPU (tests/gpu); plain
code stands in for them here."""

import pytest
import torch
from support import fake_heads
from support.tensors import CONFIG, close, gradients, random

from model import rotary_angles
from ops.activation import Activation
from ops.heads import split_heads
from ops.norm import RMSNorm

B, T, C, H, K, D = 2, 5, 32, 4, 2, 16
ROTARY = rotary_angles(T, D, 1e4)
NORMED = pytest.mark.parametrize("normed", [True, False])
BIASED = pytest.mark.parametrize("biased", [True, False])


@pytest.fixture
def kernels(monkeypatch):
    fake_heads.use(monkeypatch)


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
@BIASED
@pytest.mark.parametrize("compiled", [False, True])
def test_heads_by_kernels_have_the_values_and_gradients_of_plain_heads(request, normed, biased, compiled):
    qkv = random(B, T, (H + 2 * K) * D)
    expected = results(split_heads, qkv, normed, biased)
    request.getfixturevalue("kernels")
    split = torch.compile(split_heads, backend="aot_eager", fullgraph=True) if compiled else split_heads
    for got, value in zip(results(split, qkv, normed, biased), expected, strict=True):
        close(got, value, 1e-6)


@NORMED
def test_v_is_a_part_of_qkv_where_norms_keep_qkv_and_else_nothing_keeps_qkv(kernels, normed):
    qkv = random(B, T, (H + 2 * K) * D).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        q, k, v = split_heads(Activation(qkv), H, K, ROTARY, *norms(normed))
    kept = {tensor.untyped_storage().data_ptr() for tensor in [*saved, q, k, v]}
    assert (qkv.untyped_storage().data_ptr() in kept) == normed
    assert torch.equal(v.flatten(2), qkv[..., (H + K) * D :])
    assert v.is_contiguous() != normed
