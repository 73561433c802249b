"""Operations of the model that are faster than what autograd and torch.compile make of their plain form.

Each is stated here in plain PyTorch, which runs on a CPU and on the meta device, where FLOPs are counted. On
a GPU, ops/triton_kernels/heads.py does the same with less memory traffic. tests/test_ops.py compares the two.

    N tokens · C width · F feed-forward width · V vocabulary · H, K query and key/value heads · D head width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.library import custom_op

# --- residual sum and RMSNorm ---


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float):
    """x, delta (..., C) -> x + delta, its RMSNorm, and the largest magnitude of each row of that, or None."""
    if x.is_cuda:
        total, normed, amax = _add_rms_norm(x.flatten(0, -2), delta.flatten(0, -2), weight, eps)
        return total.view_as(x), normed.view_as(x), amax
    total = x + delta
    return total, F.rms_norm(total, weight.shape, weight.to(x.dtype), eps), None


@custom_op("nanomfu::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from ops.triton_kernels.heads import add_rms_norm_forward

    return add_rms_norm_forward(x.contiguous(), delta.contiguous(), weight, eps)


@_add_rms_norm.register_fake
def _(x, delta, weight, eps):
    shape = x.shape
    return x.new_empty(shape), x.new_empty(shape), x.new_empty(shape[0], dtype=torch.float32)


@custom_op("nanomfu::add_rms_norm_backward", mutates_args=())
def _add_rms_norm_backward(
    total: torch.Tensor, dnormed: torch.Tensor, dtotal: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from ops.triton_kernels.heads import add_rms_norm_backward

    return add_rms_norm_backward(total, dnormed.contiguous(), dtotal.contiguous(), weight, eps)


@_add_rms_norm_backward.register_fake
def _(total, dnormed, dtotal, weight, eps):
    return total.new_empty(total.shape), weight.new_empty(weight.shape, dtype=torch.float32)


def _add_rms_norm_setup(ctx, inputs, output):
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight)


def _add_rms_norm_autograd(ctx, dtotal, dnormed, damax):
    total, weight = ctx.saved_tensors
    dx, dweight = _add_rms_norm_backward(total, dnormed, dtotal, weight, ctx.eps)
    return dx, dx, dweight.to(weight.dtype), None


_add_rms_norm.register_autograd(_add_rms_norm_autograd, setup_context=_add_rms_norm_setup)


# --- SwiGLU ---

AMAX_COLUMNS = 1024  # largest magnitudes are taken over this many columns of a row


def amax_parts(width: int) -> int:
    return -(-width // AMAX_COLUMNS)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x (..., 2F), gate then up -> silu(gate) * up (..., F). Shazeer 2020."""
    if x.is_cuda:
        return swiglu_with_amax(x.flatten(0, -2))[0].unflatten(0, x.shape[:-1])
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@custom_op("nanomfu::swiglu", mutates_args=())
def swiglu_with_amax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """swiglu of x (N, 2F), and the largest magnitudes of its parts (N, amax_parts(F)), for fp8."""
    if x.is_cuda:
        from ops.triton_kernels.heads import swiglu_forward

        return swiglu_forward(x.contiguous())
    gate, up = x.float().chunk(2, dim=-1)
    h = (F.silu(gate) * up).to(x.dtype)
    return h, h.abs().float().amax(-1, keepdim=True).repeat(1, amax_parts(h.shape[1]))


@swiglu_with_amax.register_fake
def _(x):
    N, width = x.shape[0], x.shape[1] // 2
    return x.new_empty(N, width), x.new_empty(N, amax_parts(width), dtype=torch.float32)


@custom_op("nanomfu::swiglu_backward", mutates_args=())
def swiglu_backward(x: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x (N, 2F), for dh (N, F), and the largest magnitudes of its parts, as above."""
    if x.is_cuda:
        from ops.triton_kernels.heads import swiglu_backward

        return swiglu_backward(x.contiguous(), dh.contiguous())
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid, dh = gate.sigmoid(), dh.float()
    parts = (dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid)
    dx = torch.cat(parts, dim=-1).to(x.dtype)
    return dx, dx.abs().float().amax(-1, keepdim=True).repeat(1, amax_parts(dh.shape[1]))


@swiglu_backward.register_fake
def _(x, dh):
    N, width = dh.shape
    return x.new_empty(x.shape), x.new_empty(N, amax_parts(width), dtype=torch.float32)


swiglu_with_amax.register_autograd(
    lambda ctx, dh, damax: swiglu_backward(*ctx.saved_tensors, dh)[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


# --- query, key and value heads ---


def fused_heads(x: torch.Tensor, D: int, rotary) -> bool:
    """Whether the kernel can do it: a GPU, rotary positions, a head width that is a power of two."""
    return x.is_cuda and rotary is not None and D & (D - 1) == 0


def split_heads(qkv, n_head: int, n_kv_head: int, rotary, q_norm, k_norm):
    """qkv (B, T, (H + 2K) D) -> q (B, T, H, D), k and v (B, T, K, D); q and k normalised by q_norm and k_norm
    (RMSNorm modules over D, or None) and rotated by rotary (cos, sin (T, D/2) fp32, or None)."""
    B, T, width = qkv.shape
    D = width // (n_head + 2 * n_kv_head)
    if fused_heads(qkv, D, rotary):
        weights = (q_norm.weight, k_norm.weight) if q_norm is not None else (None, None)
        eps = q_norm.eps if q_norm is not None else 0.0
        return heads_forward(qkv, *weights, *rotary, n_head, n_kv_head, eps)
    q, k, v = qkv.view(B, T, -1, D).split((n_head, n_kv_head, n_kv_head), dim=2)
    if q_norm is not None:
        q, k = q_norm(q), k_norm(k)
    if rotary is not None:
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
    return q, k, v


def apply_rotary(x, cos, sin):
    """Rotates x (B, T, heads, D) by cos, sin (T, D/2) in fp32; half-split layout, as in published weights."""
    x1, x2 = x.float().chunk(2, dim=-1)  # (B, T, heads, D/2) each
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


@custom_op("nanomfu::heads", mutates_args=())
def heads_forward(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    n_head: int,
    n_kv_head: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """split_heads on a GPU."""
    from ops.triton_kernels.heads import heads_forward

    return heads_forward(qkv.contiguous(), q_weight, k_weight, cos, sin, n_head, n_kv_head, eps)


@heads_forward.register_fake
def _(qkv, q_weight, k_weight, cos, sin, n_head, n_kv_head, eps):
    B, T, D = qkv.shape[0], qkv.shape[1], 2 * cos.shape[1]
    return tuple(qkv.new_empty(B, T, heads, D) for heads in (n_head, n_kv_head, n_kv_head))


@custom_op("nanomfu::heads_backward", mutates_args=())
def heads_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dqkv, its largest magnitude, and the norm weights' gradients (2, D), or (2, 0)."""
    from ops.triton_kernels.heads import heads_backward

    gradients = (g.contiguous() for g in (dq, dk, dv))
    return heads_backward(*gradients, qkv.contiguous(), q_weight, k_weight, cos, sin, eps)


@heads_backward.register_fake
def _(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps):
    D = 0 if q_weight is None else dq.shape[-1]
    wide = {"dtype": torch.float32}
    return qkv.new_empty(qkv.shape), qkv.new_empty((), **wide), qkv.new_empty(2, D, **wide)


def _heads_setup(ctx, inputs, output):
    qkv, q_weight, k_weight, cos, sin, _, _, ctx.eps = inputs
    ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)


def _heads_autograd(ctx, dq, dk, dv):
    qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
    dqkv, _, dweights = heads_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, ctx.eps)
    dweights = (None, None) if q_weight is None else dweights.to(q_weight.dtype).unbind(0)
    return dqkv, *dweights, None, None, None, None, None


heads_forward.register_autograd(_heads_autograd, setup_context=_heads_setup)
