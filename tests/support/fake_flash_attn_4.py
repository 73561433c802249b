"""flash-attn 4 in plain PyTorch: the functions that ops/flash_attn_4.py calls, with their conventions."""

import itertools
import sys
import types

import torch

from model import manual_attention


def flash_attn_func(q, k, v, causal=False, return_lse=False):
    assert causal and return_lse
    return manual_attention(q, k, v).contiguous(), torch.zeros(q.shape[0], q.shape[2], q.shape[1])


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    causal=False,
    return_lse=False,
):
    """Each sequence by itself; the lengths of some are 0."""
    assert causal and return_lse and cu_seqlens_q is cu_seqlens_k
    assert max_seqlen_q == max_seqlen_k >= max(b - a for a, b in _parts(cu_seqlens_q, q))
    parts = [manual_attention(*(t[None, a:b] for t in (q, k, v)))[0] for a, b in _parts(cu_seqlens_q, q)]
    return torch.cat(parts), torch.zeros(q.shape[1], len(q))


def _parts(edges, q):
    assert edges.dtype == torch.int32 and edges[0] == 0 and edges[-1] == len(q)
    assert (edges.diff() >= 0).all()
    return list(itertools.pairwise(edges.tolist()))


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    causal=False,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
):
    """By the formulas: autograd does not look into an operator."""
    assert causal and out.shape == dout.shape == q.shape
    assert all(written.is_contiguous() for written in (dq, dk, dv))
    if cu_seqlens_q is not None:
        assert cu_seqlens_q is cu_seqlens_k and lse.shape == (q.shape[1], len(q))
        for a, b in _parts(cu_seqlens_q, q):
            _backward(*(t[None, a:b] for t in (q, k, v, dout, dq, dk, dv)))
        return
    assert lse.shape == (len(q), q.shape[2], q.shape[1])
    _backward(q, k, v, dout, dq, dk, dv)


def _backward(q, k, v, dout, dq, dk, dv):
    (B, T, H, D), K = q.shape, k.shape[2]
    q, dout = (t.reshape(B, T, K, H // K, D) for t in (q, dout))
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
    functions = {"flash_attn_varlen_func": flash_attn_varlen_func, **internals}
    module = types.SimpleNamespace(flash_attn_func=forward, **functions)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
