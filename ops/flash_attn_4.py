"""Computes causal attention with flash-attn 4, an extra (requirements/quack.txt).

The package is flash_attn/cute, beside flash-attn 2 or alone. At the first call it compiles kernels for this
head width, dtype and GPU. torch.compile cannot look into that, so the forward and the backward are operators
here. The backward is an internal function: the package has no public one. It ran on an H200 (LOG.md); for
compute capability 10.0, 10.3 and 12.0 its kernels were only compiled.

    B batch · T sequence · H query heads · K key/value heads · D head width
"""

from __future__ import annotations

import importlib
import inspect

import torch
from torch import Tensor
from torch.library import custom_op

PACKAGE = "flash_attn.cute.interface"
ARGUMENTS = {
    "flash_attn_func": ["return_lse"],
    "flash_attn_varlen_func": ["return_lse", "cu_seqlens_q", "max_seqlen_q"],
    "_flash_attn_bwd": ["deterministic", "dq", "dk", "dv", "cu_seqlens_q", "max_seqlen_q"],
}


def missing_argument() -> str | None:
    """What the installed release lacks of what is called here; it may be too old, as in flash-attn 2.8."""
    for name, arguments in ARGUMENTS.items():
        function = getattr(importlib.import_module(PACKAGE), name, lambda: None)
        if missing := [each for each in arguments if each not in inspect.signature(function).parameters]:
            return f"{name}({missing[0]}=...)"
    return None


@custom_op("nanomfu::flash_attn_4_forward", mutates_args=())
def flash_attn_4(
    q: Tensor, k: Tensor, v: Tensor, edges: Tensor | None = None, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D), and the log-sum-exp in fp32, (B, H, T), or with
    edges (H, B * T). edges: where documents begin, which do not see each other (ops/documents.py, Edges).
    deterministic: the backward has the same bits each time."""
    package, options = importlib.import_module(PACKAGE), {"causal": True, "return_lse": True}
    if edges is None:
        return package.flash_attn_func(q, k, v, **options)
    y, lse = package.flash_attn_varlen_func(*_flat(q, k, v), **_sequences(q, edges), **options)
    return y.view(q.shape), lse


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [one.flatten(0, 1) for one in tensors]


def _sequences(q: Tensor, edges: Tensor) -> dict:
    T = q.shape[1]
    return {"cu_seqlens_q": edges, "cu_seqlens_k": edges, "max_seqlen_q": T, "max_seqlen_k": T}


@flash_attn_4.register_fake
def _(q, k, v, edges=None, deterministic=False):
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, T) if edges is None else (H, B * T), dtype=torch.float32)


@custom_op("nanomfu::flash_attn_4_backward", mutates_args=())
def flash_attn_4_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    edges: Tensor | None,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    written = [one.new_empty(one.shape) for one in (q, k, v)]  # contiguous, whatever the strides of v
    options = {"causal": True, "deterministic": deterministic}
    given = [q, k, v, y, dy.contiguous(), *written]
    if edges is not None:
        given, options = _flat(*given), options | _sequences(q, edges)
    *read, dq, dk, dv = given
    importlib.import_module(PACKAGE)._flash_attn_bwd(*read, lse, **options, dq=dq, dk=dk, dv=dv)
    return written[0], written[1], written[2]


@flash_attn_4_backward.register_fake
def _(dy, q, k, v, y, lse, edges, deterministic):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:
    q, k, v, edges, ctx.deterministic = inputs
    ctx.save_for_backward(q, k, v, *output, edges)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    return *flash_attn_4_backward(dy, *ctx.saved_tensors, ctx.deterministic), None, None


flash_attn_4.register_autograd(_backward, setup_context=_keep)
