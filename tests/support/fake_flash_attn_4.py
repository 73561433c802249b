"""flash-attn 4 in plain PyTorch: the two functions that ops/flash_attn_4.py calls, with their conventions."""

import sys
import types

import torch

from model import manual_attention


def flash_attn_func(q, k, v, causal=False, return_lse=False):
    assert causal and return_lse
    return manual_attention(q, k, v).contiguous(), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def _flash_attn_bwd(q, k, v, out, dout, lse, causal=False, deterministic=False, dq=None, dk=None, dv=None):
    """By the formulas: autograd does not look into an operator."""
    assert causal and out.shape == dout.shape == q.shape and lse.shape == (len(q), q.shape[2], q.shape[1])
    assert all(written.is_contiguous() for written in (dq, dk, dv))
    (B, T, H, D), K = q.shape, k.shape[2]
    q, dout = (t.view(B, T, K, H // K, D) for t in (q, dout))
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    weights = (torch.einsum("btkgd,bskd->bkgts", q, k) / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    above = torch.einsum("btkgd,bskd->bkgts", dout, v)
    scores = weights * (above - (above * weights).sum(-1, keepdim=True)) / D**0.5
    dq.copy_(torch.einsum("bkgts,bskd->btkgd", scores, k).reshape(B, T, H, D))
    dk.copy_(torch.einsum("bkgts,btkgd->bskd", scores, q))
    dv.copy_(torch.einsum("bkgts,btkgd->bskd", weights, dout))


def install(monkeypatch, forward=flash_attn_func, **internals):
    """Puts it in the package's place; internals: others than the backward."""
    internals = internals or {"_flash_attn_bwd": _flash_attn_bwd}
    module = types.SimpleNamespace(flash_attn_func=forward, **internals)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
