"""What the functions around the heads' kernels compute and keep. The kernels need a GPU (tests/gpu); plain
code stands in for them here."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from support.tensors import CONFIG, close, fp8_linear, gradients, random, random_bf16

from model import RMSNorm, rotary_angles
from ops import heads
from ops.heads import Rotary, apply_rotary, project_heads, split_heads

B, T, C, H, K, D = 2, 5, 32, 4, 2, 16
ROTARY = rotary_angles(T, D, 1e4)
NORMED = pytest.mark.parametrize("normed", [True, False])


def plain_forward(qkv, q_weight, k_weight, cos, sin, n_head, n_kv_head, eps):
    q, k, _ = qkv.unflatten(-1, (-1, D)).split((n_head, n_kv_head, n_kv_head), dim=2)
    if q_weight is not None:
        q, k = F.rms_norm(q, (D,), q_weight.to(q.dtype), eps), F.rms_norm(k, (D,), k_weight.to(k.dtype), eps)
    return apply_rotary(q, Rotary(cos, sin)), apply_rotary(k, Rotary(cos, sin))


def norm_backward(dy, x, weight, eps):
    dy, x = dy.float(), x.float()
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    n, dn = x * scale, dy * weight
    return scale * (dn - n * (dn * n).mean(-1, keepdim=True)), (dy * n).sum((0, 1, 2))


def plain_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps):
    dq, dk = (apply_rotary(d, Rotary(cos, -sin)) for d in (dq, dk))  # the other way round
    dweights = torch.empty(2, 0)
    if q_weight is not None:
        q, k, _ = qkv.unflatten(-1, (-1, D)).split((H, K, K), dim=2)
        dq, dq_weight = norm_backward(dq, q, q_weight, eps)
        dk, dk_weight = norm_backward(dk, k, k_weight, eps)
        dweights = torch.stack([dq_weight, dk_weight])
    dqkv = torch.cat([dq, dk, dv], dim=2).flatten(2).to(dv.dtype)
    return dqkv, dqkv.abs().amax().float(), dweights


@pytest.fixture
def kernels(monkeypatch):
    module = types.SimpleNamespace(triton_heads=plain_forward, triton_heads_backward=plain_backward)
    monkeypatch.setitem(sys.modules, "ops.triton_kernels.heads", module)
    monkeypatch.setattr(heads, "_kernel_fits", lambda *_: True)


def norms(normed):
    made = [RMSNorm(D, CONFIG) if normed else None for _ in "qk"]
    for i, norm in enumerate(made):
        if norm is not None:
            norm.weight.data = 1 + 0.3 * random(D, std=1.0 + i)
    return made


def results(function, x, normed):
    """q, k, v, and the gradients of x and of the norms' weights."""
    x, used = x.clone().requires_grad_(), norms(normed)
    parts = function(x, H, K, ROTARY, *used)
    loss = sum((part * random(B, T, n, D)).sum() for part, n in zip(parts, (H, K, K), strict=True))
    return [*parts, *gradients(loss, x, *(norm.weight for norm in used if norm is not None))]


@NORMED
@pytest.mark.parametrize("compiled", [False, True])
def test_heads_by_kernels_have_the_values_and_gradients_of_plain_heads(request, normed, compiled):
    qkv = random(B, T, (H + 2 * K) * D)
    expected = results(split_heads, qkv, normed)
    request.getfixturevalue("kernels")
    split = torch.compile(split_heads, backend="aot_eager", fullgraph=True) if compiled else split_heads
    for got, value in zip(results(split, qkv, normed), expected, strict=True):
        close(got, value, 1e-6)


@NORMED
def test_fp8_heads_by_kernels_have_the_values_and_gradients_of_plain_heads(request, normed):
    layer, x = fp8_linear(random_bf16((H + 2 * K) * D, C, std=0.1)), random_bf16(B, T, C)

    def project(x, n_head, n_kv_head, *rest):
        return project_heads(x, None, layer, n_head, n_kv_head, *rest)

    layer.weight_grad = torch.zeros(layer.weight.shape)
    expected = results(project, x, normed)
    expected.append(layer.weight_grad.clone())
    layer.weight_grad.zero_()
    request.getfixturevalue("kernels")
    for got, value in zip([*results(project, x, normed), layer.weight_grad], expected, strict=True):
        close(got, value, 0.02)  # the plain form rounds to bf16 between norm and rotation


@NORMED
def test_v_is_a_part_of_qkv_where_norms_keep_qkv_and_else_nothing_keeps_qkv(kernels, normed):
    qkv = random(B, T, (H + 2 * K) * D).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        q, k, v = split_heads(qkv, H, K, ROTARY, *norms(normed))
    kept = {tensor.untyped_storage().data_ptr() for tensor in [*saved, q, k, v]}
    assert (qkv.untyped_storage().data_ptr() in kept) == normed
    assert torch.equal(v.flatten(2), qkv[..., (H + K) * D :])
    assert v.is_contiguous() != normed
