"""Triton kernels for the parts of a step that memory bandwidth limits. ops.py calls them on a GPU and says
what they compute; each reads its inputs and writes its outputs once, which compiled PyTorch did not (LOG.md).

Every kernel computes in fp32, whatever its tensors are stored in, and adds in a fixed order.

    N tokens · F feed-forward width · V vocabulary · H, K query and key/value heads · D head width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# --- SwiGLU ---

SWIGLU_BLOCK = 1024


@triton.jit
def _swiglu_forward(x, h, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=inside).to(tl.float32)
    tl.store(h + row * F + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _swiglu_backward(x, dh, dx, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=inside).to(tl.float32)
    d = tl.load(dh + row * F + column, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(dx + row * 2 * F + column, d * up * sigmoid * (1 + gate * (1 - sigmoid)), mask=inside)
    tl.store(dx + row * 2 * F + F + column, d * gate * sigmoid, mask=inside)


def swiglu_forward(x: torch.Tensor) -> torch.Tensor:
    """x (N, 2F), gate then up -> silu(gate) * up (N, F)."""
    N, F = x.shape[0], x.shape[1] // 2
    h = torch.empty(N, F, dtype=x.dtype, device=x.device)
    _swiglu_forward[(N, triton.cdiv(F, SWIGLU_BLOCK))](x, h, F, BLOCK=SWIGLU_BLOCK)
    return h


def swiglu_backward(x: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
    """dh (N, F) -> dx (N, 2F)."""
    N, F = dh.shape
    dx = torch.empty_like(x)
    _swiglu_backward[(N, triton.cdiv(F, SWIGLU_BLOCK))](x, dh, dx, F, BLOCK=SWIGLU_BLOCK)
    return dx


# --- query, key and value heads: QK-norm and rotary positions ---

# A row is one head of one token. The rows of qkv lie in order: of each token H query, K key, K value heads.
HEADS_BLOCK = 16  # rows of one program
HEADS_PROGRAMS = 2048  # of the backward; each sums its part of the norm weights' gradients


@triton.jit
def _normalized(x1, x2, eps, HALF: tl.constexpr):
    """Both halves of rows divided by their root mean square, and the factor."""
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
    return x1 * scale, x2 * scale, scale


@triton.jit
def _heads_forward(
    qkv, q, k, v, q_weight, k_weight, cos, sin, rows, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HALF)[None, :]
    inside = (row < rows)[:, None]
    token, head = (row // (H + 2 * K))[:, None], (row % (H + 2 * K))[:, None]
    is_q, is_v = head < H, head >= H + K
    at = row.to(tl.int64)[:, None] * (2 * HALF) + d
    x1 = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
    n1, n2 = x1, x2
    if NORM:
        n1, n2, _ = _normalized(x1, x2, eps, HALF)
        n1 *= tl.where(is_q, tl.load(q_weight + d), tl.load(k_weight + d)).to(tl.float32)
        n2 *= tl.where(is_q, tl.load(q_weight + HALF + d), tl.load(k_weight + HALF + d)).to(tl.float32)
    angle = (token % T) * HALF + d
    c, s = tl.load(cos + angle, mask=inside), tl.load(sin + angle, mask=inside)
    y1, y2 = n1 * c - n2 * s, n2 * c + n1 * s
    token = token.to(tl.int64)
    at = (token * H + head) * (2 * HALF) + d
    tl.store(q + at, y1, mask=inside & is_q)
    tl.store(q + at + HALF, y2, mask=inside & is_q)
    is_k = (is_q | is_v) == 0
    at = (token * K + head - H) * (2 * HALF) + d
    tl.store(k + at, y1, mask=inside & is_k)
    tl.store(k + at + HALF, y2, mask=inside & is_k)
    at = (token * K + head - H - K) * (2 * HALF) + d
    tl.store(v + at, x1, mask=inside & is_v)
    tl.store(v + at + HALF, x2, mask=inside & is_v)


@triton.jit
def _heads_backward(
    qkv, dq, dk, dv, q_weight, k_weight, cos, sin, dqkv, partial, rows, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, HALF)[None, :]
    if NORM:
        dwq1 = tl.zeros((BLOCK, HALF), tl.float32)
        dwq2 = tl.zeros((BLOCK, HALF), tl.float32)
        dwk1 = tl.zeros((BLOCK, HALF), tl.float32)
        dwk2 = tl.zeros((BLOCK, HALF), tl.float32)
    for start in range(tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None]
        token, head = (row // (H + 2 * K))[:, None], (row % (H + 2 * K))[:, None]
        is_q, is_v = head < H, head >= H + K
        is_k = (is_q | is_v) == 0
        angle = (token % T) * HALF + d
        c, s = tl.load(cos + angle, mask=inside, other=0.0), tl.load(sin + angle, mask=inside, other=0.0)
        token = token.to(tl.int64)
        # each row has one of the three gradients; the masks leave the other two zero
        at = (token * H + head) * (2 * HALF) + d
        g1 = tl.load(dq + at, mask=inside & is_q, other=0.0).to(tl.float32)
        g2 = tl.load(dq + at + HALF, mask=inside & is_q, other=0.0).to(tl.float32)
        at = (token * K + head - H) * (2 * HALF) + d
        g1 += tl.load(dk + at, mask=inside & is_k, other=0.0).to(tl.float32)
        g2 += tl.load(dk + at + HALF, mask=inside & is_k, other=0.0).to(tl.float32)
        at = (token * K + head - H - K) * (2 * HALF) + d
        v1 = tl.load(dv + at, mask=inside & is_v, other=0.0).to(tl.float32)
        v2 = tl.load(dv + at + HALF, mask=inside & is_v, other=0.0).to(tl.float32)
        dn1, dn2 = g1 * c + g2 * s, g2 * c - g1 * s
        at = row.to(tl.int64)[:, None] * (2 * HALF) + d
        if NORM:
            x1 = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
            n1, n2, scale = _normalized(x1, x2, eps, HALF)
            dwq1 += tl.where(is_q, dn1 * n1, 0.0)
            dwq2 += tl.where(is_q, dn2 * n2, 0.0)
            dwk1 += tl.where(is_k, dn1 * n1, 0.0)
            dwk2 += tl.where(is_k, dn2 * n2, 0.0)
            dn1 *= tl.where(is_q, tl.load(q_weight + d), tl.load(k_weight + d)).to(tl.float32)
            dn2 *= tl.where(is_q, tl.load(q_weight + HALF + d), tl.load(k_weight + HALF + d)).to(tl.float32)
            along = ((tl.sum(dn1 * n1, 1) + tl.sum(dn2 * n2, 1)) / (2 * HALF))[:, None]
            dn1, dn2 = scale * (dn1 - n1 * along), scale * (dn2 - n2 * along)
        tl.store(dqkv + at, dn1 + v1, mask=inside)
        tl.store(dqkv + at + HALF, dn2 + v2, mask=inside)
    if NORM:
        d = tl.arange(0, HALF)
        mine = partial + tl.program_id(0) * 4 * HALF + d
        tl.store(mine, tl.sum(dwq1, 0))
        tl.store(mine + HALF, tl.sum(dwq2, 0))
        tl.store(mine + 2 * HALF, tl.sum(dwk1, 0))
        tl.store(mine + 3 * HALF, tl.sum(dwk2, 0))


def heads_forward(qkv, q_weight, k_weight, cos, sin, H: int, K: int, eps: float):
    """qkv (B, T, (H + 2K) D), weights (D,) or None, cos and sin (T, D/2) fp32
    -> q (B, T, H, D), k and v (B, T, K, D)."""
    B, T, D = qkv.shape[0], qkv.shape[1], 2 * cos.shape[1]
    q, k, v = (torch.empty(B, T, heads, D, dtype=qkv.dtype, device=qkv.device) for heads in (H, K, K))
    rows, norm = B * T * (H + 2 * K), q_weight is not None
    _heads_forward[(triton.cdiv(rows, HEADS_BLOCK),)](
        qkv, q, k, v, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, rows, T, eps,
        H=H, K=K, HALF=D // 2, NORM=norm, BLOCK=HEADS_BLOCK,
    )  # fmt: skip
    return q, k, v


def heads_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps: float):
    """Gradients of q, k, v -> dqkv, and those of the norm weights (D,) fp32 or None."""
    B, T, H, D = dq.shape
    K, norm = dk.shape[2], q_weight is not None
    rows = B * T * (H + 2 * K)
    programs = min(HEADS_PROGRAMS, triton.cdiv(rows, HEADS_BLOCK))
    dqkv = torch.empty_like(qkv)
    partial = torch.empty(programs if norm else 1, 2, D, dtype=torch.float32, device=qkv.device)
    _heads_backward[(programs,)](
        qkv, dq, dk, dv, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, dqkv, partial,
        rows, T, eps, H=H, K=K, HALF=D // 2, NORM=norm, BLOCK=HEADS_BLOCK,
    )  # fmt: skip
    return (dqkv, *partial.sum(0)) if norm else (dqkv, None, None)


# --- cross-entropy ---

LOSS_BLOCK = 8192


@triton.jit
def _cross_entropy(logits, targets, losses, log_sums, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    target = tl.load(targets + row)
    highest = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < V, other=-float("inf")).to(tl.float32)
        new = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(x - new), 0)
        highest = new
    log_sum = highest + tl.log(total)
    tl.store(log_sums + row, log_sum)
    counted = target >= 0
    picked = tl.load(logits + target, mask=counted, other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(counted, log_sum - picked, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # the target's logit has been read by all before it is overwritten
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < V, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - log_sum)
            p = tl.where(column == target, p - 1.0, p)
            tl.store(logits + column, tl.where(counted, p, 0.0), mask=column < V)


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, 0 for a negative target, and log-sum-exps of logits (N, V), both (N,) fp32; with gradient=True
    the logits become softmax - one_hot, or 0: in place, so there is no second (N, V) tensor."""
    N, V = logits.shape
    losses, log_sums = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(2))
    block = min(LOSS_BLOCK, triton.next_power_of_2(V))
    _cross_entropy[(N,)](
        logits, targets, losses, log_sums, V, GRADIENT=gradient, BLOCK=block, num_warps=16
    )  # fmt: skip
    return losses, log_sums
