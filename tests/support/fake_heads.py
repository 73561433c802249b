"""The kernels of ops/triton_kernels/heads.py in plain PyTorch, so that a CPU goes the way of a GPU."""

import sys
import types

import torch
import torch.nn.functional as F

from ops import heads
from ops.heads import Rotary, apply_rotary


def forward(qkv, bias, q_weight, k_weight, cos, sin, n_head, n_kv_head, eps):
    D = 2 * cos.shape[1]
    qkv = qkv if bias is None else qkv + bias
    q, k, v = qkv.unflatten(-1, (-1, D)).split((n_head, n_kv_head, n_kv_head), dim=2)
    if q_weight is not None:
        q, k = F.rms_norm(q, (D,), q_weight.to(q.dtype), eps), F.rms_norm(k, (D,), k_weight.to(k.dtype), eps)
    v = v.clone() if q_weight is None else v[:, :, :0].clone()
    return apply_rotary(q, Rotary(cos, sin)), apply_rotary(k, Rotary(cos, sin)), v


def norm_backward(dy, x, weight, eps):
    dy, x = dy.float(), x.float()
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    n, dn = x * scale, dy * weight
    return scale * (dn - n * (dn * n).mean(-1, keepdim=True)), (dy * n).sum((0, 1, 2))


def backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps, bias):
    H, D, K = *dq.shape[2:], dk.shape[2]
    dq, dk = (apply_rotary(d, Rotary(cos, -sin)) for d in (dq, dk))  # the other way round
    sums = torch.empty(0)
    if q_weight is not None:
        q, k, _ = qkv.unflatten(-1, (-1, D)).split((H, K, K), dim=2)
        dq, dq_weight = norm_backward(dq, q, q_weight, eps)
        dk, dk_weight = norm_backward(dk, k, k_weight, eps)
        sums = torch.stack([dq_weight, dk_weight])
    dqkv = torch.cat([dq, dk, dv], dim=2).flatten(2).to(dv.dtype)
    if bias:
        sums = dqkv.float().sum((0, 1))
    return dqkv, dqkv.abs().amax().float(), sums


def use(monkeypatch) -> None:
    """Heads are made by these from here on."""
    module = types.SimpleNamespace(triton_heads=forward, triton_heads_backward=backward)
    monkeypatch.setitem(sys.modules, "ops.triton_kernels.heads", module)
    monkeypatch.setattr(heads, "_kernel_fits", lambda *_: True)
