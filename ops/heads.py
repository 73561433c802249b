"""From the projection q, k, v to the heads of attention: its bias or QK-norm, rotary positions.

B batch · T sequence · H query heads · K key/value heads · D head width
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ops.activation import Activation
from ops.custom_op import custom_op, register_fake
from ops.norm import RMSNorm
from ops.ranges import ranged


class Rotary(NamedTuple):
    """Rotary angles of positions 0 to T - 1; fp32, whatever dtype they are applied in."""

    cos: torch.Tensor  # (T, D/2)
    sin: torch.Tensor  # (T, D/2)


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q (B, T, H, D), k and v (B, T, K, D)


@ranged("heads")
def split_heads(
    qkv: Activation,
    n_head: int,
    n_kv_head: int,
    rotary: Rotary | None,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
) -> Heads:
    """qkv (B, T, (H + 2K) D), a row q, then k, then v -> q (B, T, H, D), k and v (B, T, K, D); q and k
    normalized and rotated, if there are norms and angles."""
    if rotary is not None and _kernel_fits(qkv.value, rotary):
        if q_norm is not None and qkv.bias is not None:  # the kernel has one or the other
            qkv = Activation(qkv.plain())
        layout = HeadLayout(n_head, n_kv_head, rotary, 0.0 if q_norm is None else q_norm.eps)
        # the norms' weights need gradients, so they are arguments by themselves
        norms = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
        return SplitHeads.apply(qkv.value, qkv.bias, qkv.gradient_amax, *norms, layout)
    x = qkv.plain()
    B, T, width = x.shape
    D = width // (n_head + 2 * n_kv_head)
    q, k, v = x.view(B, T, -1, D).split((n_head, n_kv_head, n_kv_head), dim=2)
    if q_norm is not None and k_norm is not None:
        q, k = q_norm(q), k_norm(k)
    if rotary is not None:
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
    return q, k, v


def merge_heads(y: torch.Tensor) -> Activation:
    """What an attention kernel wrote, (B, T, H, D) -> (B, T, H D)."""
    return Activation(y.flatten(2), opaque=True)


def keeps_copies(x: torch.Tensor, rotary: Rotary | None, q_norm: RMSNorm | None) -> bool:
    """Whether attention's q and k are kept beside the qkv that they were computed from."""
    return rotary is not None and (q_norm is not None or not _kernel_fits(x, rotary))


def apply_rotary(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotates x (B, T, heads, D) in fp32. Su et al. 2021; half-split layout, as in published weights."""
    x1, x2 = x.float().chunk(2, dim=-1)  # (B, T, heads, D/2) each
    cos, sin = rotary.cos[:, None, :], rotary.sin[:, None, :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def _kernel_fits(x: torch.Tensor, rotary: Rotary) -> bool:
    """Whether the Triton form can do it: on a GPU, and the head width is a power of two."""
    D = 2 * rotary.cos.shape[1]
    return x.is_cuda and D & (D - 1) == 0


class HeadLayout(NamedTuple):
    """How a row of qkv divides into heads, and what is applied to them, but for the norms' weights."""

    n_head: int
    n_kv_head: int
    rotary: Rotary
    norm_eps: float


# --- the Triton form ---


@custom_op("nanomfu::heads", mutates_args=())
def heads_forward(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    n_head: int,
    n_kv_head: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of split_heads; with norms, v has no heads."""
    from ops.triton_kernels.heads import triton_heads

    return triton_heads(qkv.contiguous(), bias, q_weight, k_weight, cos, sin, n_head, n_kv_head, eps)


@register_fake(heads_forward)
def _(qkv, bias, q_weight, k_weight, cos, sin, n_head, n_kv_head, eps):
    B, T, D = qkv.shape[0], qkv.shape[1], 2 * cos.shape[1]
    counts = n_head, n_kv_head, n_kv_head if q_weight is None else 0
    return tuple(qkv.new_empty(B, T, heads, D) for heads in counts)


@custom_op("nanomfu::heads_backward", mutates_args=())
def heads_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dqkv, its amax (one number), and the gradients, fp32, of the norms' weights (2, D), or of the bias
    (width,), or (0,). Only norms need qkv."""
    from ops.triton_kernels.heads import triton_heads_backward

    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    qkv = None if qkv is None else qkv.contiguous()
    return triton_heads_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps, bias)


@register_fake(heads_backward)
def _(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps, bias):
    B, T, H, D = dq.shape
    width = (H + 2 * dk.shape[2]) * D
    shape = (width if bias else 0,) if q_weight is None else (2, D)
    amax, sums = (dq.new_empty(size, dtype=torch.float32) for size in ((), shape))
    return dq.new_empty(B, T, width), amax, sums


class SplitHeads(torch.autograd.Function):
    """split_heads on a GPU: an operator for torch.compile may not return a view, a function may."""

    @staticmethod
    def forward(ctx, qkv, bias, gradient_amax, q_weight, k_weight, layout: HeadLayout):
        n_head, n_kv_head, rotary, eps = layout
        q, k, v = heads_forward(qkv, bias, q_weight, k_weight, *rotary, n_head, n_kv_head, eps)
        # Norms need qkv in their backward, so v stays inside of it and is not copied. Without norms nobody
        # needs qkv, and a copy of v lets it be freed.
        if q_weight is not None:
            v = qkv.unflatten(-1, (-1, q.shape[-1]))[:, :, n_head + n_kv_head :]
        ctx.save_for_backward(None if q_weight is None else qkv, q_weight, k_weight, *rotary)
        ctx.eps, ctx.tells_amax = eps, gradient_amax is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        return q, k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        kept = ctx.saved_tensors  # once: what torch.utils.checkpoint() computes again can be taken only once
        dqkv, amax, sums = heads_backward(dq, dk, dv, *kept, ctx.eps, ctx.bias_dtype is not None)
        weight = kept[1]
        dbias = None if ctx.bias_dtype is None else sums.to(ctx.bias_dtype)
        dnorms = (None, None) if weight is None else sums.to(weight.dtype).unbind(0)
        return dqkv, dbias, amax if ctx.tells_amax else None, *dnorms, None
