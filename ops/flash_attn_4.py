"""Computes causal attention with flash-attn 4, an extra (requirements-quack.txt).

The package is flash_attn/cute, beside flash-attn 2 or alone. At the first call it compiles kernels for this
head width, dtype and GPU. torch.compile cannot look into that, so the forward and the backward are operators
here. The backward is an internal function: the package has no public one. Not yet run or timed on a GPU;
its kernels were only compiled, for compute capability 9.0, 10.0, 10.3 and 12.0.

    B batch · T sequence · H query heads · K key/value heads · D head width
"""

from __future__ import annotations

import importlib
import inspect

import torch
from torch import Tensor
from torch.library import custom_op

PACKAGE = "flash_attn.cute.interface"
ARGUMENTS = {"flash_attn_func": ["return_lse"], "_flash_attn_bwd": ["deterministic", "dq", "dk", "dv"]}


def missing_argument() -> str | None:
    """What the installed release lacks of what is called here; it may be too old, as in flash-attn 2.8."""
    for name, arguments in ARGUMENTS.items():
        function = getattr(importlib.import_module(PACKAGE), name, lambda: None)
        if missing := [each for each in arguments if each not in inspect.signature(function).parameters]:
            return f"{name}({missing[0]}=...)"
    return None


@custom_op("nanomfu::flash_attn_4_forward", mutates_args=())
def flash_attn_4(q: Tensor, k: Tensor, v: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H, D), and the log-sum-exp (B, H, T) in fp32.
    deterministic: the backward has the same bits each time."""
    return importlib.import_module(PACKAGE).flash_attn_func(q, k, v, causal=True, return_lse=True)


@flash_attn_4.register_fake
def _(q, k, v, deterministic=False):
    B, T, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, H, T, dtype=torch.float32)


@custom_op("nanomfu::flash_attn_4_backward", mutates_args=())
def flash_attn_4_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (one.new_empty(one.shape) for one in (q, k, v))  # contiguous, whatever the strides of v
    options = {"causal": True, "deterministic": deterministic, "dq": dq, "dk": dk, "dv": dv}
    importlib.import_module(PACKAGE)._flash_attn_bwd(q, k, v, y, dy.contiguous(), lse, **options)
    return dq, dk, dv


@flash_attn_4_backward.register_fake
def _(dy, q, k, v, y, lse, deterministic):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.deterministic = inputs[3]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    return *flash_attn_4_backward(dy, *ctx.saved_tensors, ctx.deterministic), None


flash_attn_4.register_autograd(_backward, setup_context=_keep)
