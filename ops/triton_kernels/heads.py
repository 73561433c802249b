"""ops/heads.py on a GPU: QK-norm and rotary positions on the fused qkv, and their backward.

B batch · T sequence · H query heads · K key/value heads · D head width, HALF = D/2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.launch import walking_programs

# A token's rows of qkv lie in order: H query, K key, K value heads of D. A program takes HEADS_BLOCK of them,
# so that it reads the angles once.
HEADS_BLOCK = 32
HEADS_PROGRAMS = 8  # of the backward, on each multiprocessor; each sums its part of dweight


@triton.jit
def _normalized(x1, x2, eps, HALF: tl.constexpr):
    """Both halves of rows divided by their root mean square, and the factor."""
    scale = tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)[:, None]
    return x1 * scale, x2 * scale, scale


@triton.jit
def _heads_forward(
    qkv, q, k, v, q_weight, k_weight, cos, sin, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, HALF)[None, :]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    at = qkv + (token * (H + 2 * K) + head) * (2 * HALF) + d
    x1 = tl.load(at, mask=head < H + 2 * K, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=head < H + 2 * K, other=0.0).to(tl.float32)
    n1, n2 = x1, x2
    if NORM:
        n1, n2, _ = _normalized(x1, x2, eps, HALF)
        n1 *= tl.where(is_q, tl.load(q_weight + d), tl.load(k_weight + d)).to(tl.float32)
        n2 *= tl.where(is_q, tl.load(q_weight + HALF + d), tl.load(k_weight + HALF + d)).to(tl.float32)
    angle = (token % T) * HALF + d
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    y1, y2 = n1 * c - n2 * s, n2 * c + n1 * s
    at = q + (token * H + head) * (2 * HALF) + d
    tl.store(at, y1, mask=is_q)
    tl.store(at + HALF, y2, mask=is_q)
    at = k + (token * K + head - H) * (2 * HALF) + d
    tl.store(at, y1, mask=is_k)
    tl.store(at + HALF, y2, mask=is_k)
    at = v + (token * K + head - H - K) * (2 * HALF) + d
    tl.store(at, x1, mask=is_v)
    tl.store(at + HALF, x2, mask=is_v)


@triton.jit
def _heads_backward(
    qkv, dq, dk, dv, q_weight, k_weight, cos, sin, dqkv, partial, amax, tokens, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    d = tl.arange(0, HALF)[None, :]
    is_q, is_k, is_v = head < H, (head >= H) & (head < H + K), (head >= H + K) & (head < H + 2 * K)
    rotated, live = head < H + K, head < H + 2 * K
    largest = tl.zeros((BLOCK, HALF), tl.float32)
    if NORM:
        w1 = tl.where(is_q, tl.load(q_weight + d), tl.load(k_weight + d)).to(tl.float32)
        w2 = tl.where(is_q, tl.load(q_weight + HALF + d), tl.load(k_weight + HALF + d)).to(tl.float32)
        dw1 = tl.zeros((BLOCK, HALF), tl.float32)  # row by row; a row is always the same head
        dw2 = tl.zeros((BLOCK, HALF), tl.float32)
    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = index.to(tl.int64)  # type: ignore[attr-defined]  # in a kernel, range gives tensors
        # each row has one of the three gradients; the masks leave the other two zero
        at = (token * H + head) * (2 * HALF) + d
        g1 = tl.load(dq + at, mask=is_q, other=0.0).to(tl.float32)
        g2 = tl.load(dq + at + HALF, mask=is_q, other=0.0).to(tl.float32)
        at = (token * K + head - H) * (2 * HALF) + d
        g1 += tl.load(dk + at, mask=is_k, other=0.0).to(tl.float32)
        g2 += tl.load(dk + at + HALF, mask=is_k, other=0.0).to(tl.float32)
        angle = (token % T) * HALF + d
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        dn1, dn2 = g1 * c + g2 * s, g2 * c - g1 * s
        row = (token * (H + 2 * K) + head) * (2 * HALF) + d
        if NORM:
            x1 = tl.load(qkv + row, mask=rotated, other=0.0).to(tl.float32)
            x2 = tl.load(qkv + row + HALF, mask=rotated, other=0.0).to(tl.float32)
            n1, n2, scale = _normalized(x1, x2, eps, HALF)
            dw1 += dn1 * n1
            dw2 += dn2 * n2
            dn1 *= w1
            dn2 *= w2
            along = ((tl.sum(dn1 * n1, 1) + tl.sum(dn2 * n2, 1)) / (2 * HALF))[:, None]
            dn1, dn2 = scale * (dn1 - n1 * along), scale * (dn2 - n2 * along)
        at = (token * K + head - H - K) * (2 * HALF) + d
        dn1 += tl.load(dv + at, mask=is_v, other=0.0).to(tl.float32)
        dn2 += tl.load(dv + at + HALF, mask=is_v, other=0.0).to(tl.float32)
        y1, y2 = dn1.to(dqkv.dtype.element_ty), dn2.to(dqkv.dtype.element_ty)
        tl.store(dqkv + row, y1, mask=live)
        tl.store(dqkv + row + HALF, y2, mask=live)
        largest = tl.maximum(largest, tl.maximum(tl.abs(y1.to(tl.float32)), tl.abs(y2.to(tl.float32))))
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(amax + program, tl.max(tl.max(largest, 1), 0))
    if NORM:
        mine = partial + program * 4 * HALF + tl.arange(0, HALF)
        tl.store(mine, tl.sum(tl.where(is_q, dw1, 0.0), 0))
        tl.store(mine + HALF, tl.sum(tl.where(is_q, dw2, 0.0), 0))
        tl.store(mine + 2 * HALF, tl.sum(tl.where(is_k, dw1, 0.0), 0))
        tl.store(mine + 3 * HALF, tl.sum(tl.where(is_k, dw2, 0.0), 0))


def triton_heads(qkv, q_weight, k_weight, cos, sin, H: int, K: int, eps: float):
    """qkv (B, T, (H + 2K) D), weights (D,) or None, cos and sin (T, D/2) fp32
    -> q (B, T, H, D), k and v (B, T, K, D)."""
    B, T, D = qkv.shape[0], qkv.shape[1], 2 * cos.shape[1]
    q, k, v = (torch.empty(B, T, heads, D, dtype=qkv.dtype, device=qkv.device) for heads in (H, K, K))
    norm, grid = q_weight is not None, (B * T, triton.cdiv(H + 2 * K, HEADS_BLOCK))
    _heads_forward[grid](
        qkv, q, k, v, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, T, eps,
        H=H, K=K, HALF=D // 2, NORM=norm, BLOCK=HEADS_BLOCK,
    )  # fmt: skip
    return q, k, v


def triton_heads_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps: float):
    """Gradients of q, k, v -> dqkv, its largest magnitude, and the norm weights' gradients (2, D) fp32, q
    then k; (2, 0) without norm."""
    B, T, H, D = dq.shape
    K, norm = dk.shape[2], q_weight is not None
    parts = triton.cdiv(H + 2 * K, HEADS_BLOCK)
    grid = min(triton.cdiv(walking_programs(qkv.device, HEADS_PROGRAMS), parts), B * T), parts
    dqkv = torch.empty_like(qkv)
    programs = grid[0] * grid[1]
    partial = torch.empty(programs, 2, D if norm else 0, dtype=torch.float32, device=qkv.device)
    amax = torch.empty(programs, dtype=torch.float32, device=qkv.device)
    _heads_backward[grid](
        qkv, dq, dk, dv, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, dqkv, partial, amax,
        B * T, T, eps, H=H, K=K, HALF=D // 2, NORM=norm, BLOCK=HEADS_BLOCK,
    )  # fmt: skip
    return dqkv, amax.amax(), partial.sum(0)
