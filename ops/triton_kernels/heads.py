"""ops/heads.py on a GPU: QK-norm and rotary positions on the fused qkv, and their backward.

B batch · T sequence · H query heads · K key/value heads · D head width, HALF = D/2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.launch import walking_programs
from ops.triton_kernels.sum_parts import sum_parts

# A token's rows of qkv lie in order: H query, K key, K value heads of D. A program works on HEADS_BLOCK heads
# of one kind at a time; where their number is no multiple of it, masks leave out the rest.
HEADS_BLOCK = 8
# Programs of the backward on each multiprocessor; each sums its part of dweight. At a head width of 128 they
# are all resident: 4 warps of 64 registers a thread or fewer, compiled for 8.0, 8.9, 9.0 or 10.0.
HEADS_PROGRAMS = 6
HEADS_STAGES = 3  # the backward loads two tokens while it computes the one before


@triton.jit
def _normalized(x1, x2, eps, HALF: tl.constexpr):
    """Both halves of rows divided by their root mean square, and the factor."""
    scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    return x1 * scale, x2 * scale, scale


@triton.jit
def _rotate_heads(
    token_rows, out, weight, c, s, eps,
    COUNT: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The COUNT heads of one token, from token_rows to out."""
    d = tl.arange(0, HALF)[None, :]
    if NORM:
        w1, w2 = tl.load(weight + d).to(tl.float32), tl.load(weight + HALF + d).to(tl.float32)
    for first in tl.static_range(0, COUNT, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        at, inside = head * (2 * HALF) + d, head < COUNT
        x1 = tl.load(token_rows + at, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(token_rows + at + HALF, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            x1, x2, _ = _normalized(x1, x2, eps, HALF)
            x1 *= w1
            x2 *= w2
        tl.store(out + at, x1 * c - x2 * s, mask=inside)
        tl.store(out + at + HALF, x2 * c + x1 * s, mask=inside)


@triton.jit
def _heads_forward(
    qkv, q, k, q_weight, k_weight, cos, sin, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has one token, so that it reads the angles once."""
    D: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    rows = qkv + token * (H + 2 * K) * D
    angle = (token % T) * HALF + tl.arange(0, HALF)[None, :]
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    _rotate_heads(rows, q + token * H * D, q_weight, c, s, eps, H, HALF, NORM, BLOCK)
    _rotate_heads(rows + H * D, k + token * K * D, k_weight, c, s, eps, K, HALF, NORM, BLOCK)


@triton.jit
def _rotated_backward(
    qkv, dy, weight, cos, sin, dqkv, partial, amax, first, COUNT, tokens, T, eps,
    ROW: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Heads first to first + BLOCK of the COUNT that dy has, of every num_programs(1)-th token. qkv and dqkv
    begin where those COUNT heads begin in a token's ROW of columns. partial (D,) is dweight's part."""
    d = tl.arange(0, HALF)[None, :]
    head = first + tl.arange(0, BLOCK)[:, None]
    at, inside = head * (2 * HALF) + d, head < COUNT
    largest = tl.zeros((BLOCK, HALF), tl.float32)
    if NORM:
        w1, w2 = tl.load(weight + d).to(tl.float32), tl.load(weight + HALF + d).to(tl.float32)
        dw1 = tl.zeros((BLOCK, HALF), tl.float32)
        dw2 = tl.zeros((BLOCK, HALF), tl.float32)
    for index in tl.range(tl.program_id(1), tokens, tl.num_programs(1), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        above, row = dy + token * COUNT * (2 * HALF) + at, token * ROW + at
        g1 = tl.load(above, mask=inside, other=0.0).to(tl.float32)
        g2 = tl.load(above + HALF, mask=inside, other=0.0).to(tl.float32)
        angle = (index % T) * HALF + d
        c, s = tl.load(cos + angle), tl.load(sin + angle)
        dn1, dn2 = g1 * c + g2 * s, g2 * c - g1 * s
        if NORM:
            x1 = tl.load(qkv + row, mask=inside, other=0.0).to(tl.float32)
            x2 = tl.load(qkv + row + HALF, mask=inside, other=0.0).to(tl.float32)
            n1, n2, scale = _normalized(x1, x2, eps, HALF)
            dw1 += dn1 * n1
            dw2 += dn2 * n2
            dn1 *= w1
            dn2 *= w2
            along = (tl.sum(dn1 * n1 + dn2 * n2, 1) / (2 * HALF))[:, None]
            dn1, dn2 = scale * (dn1 - n1 * along), scale * (dn2 - n2 * along)
        y1, y2 = dn1.to(dqkv.dtype.element_ty), dn2.to(dqkv.dtype.element_ty)
        tl.store(dqkv + row, y1, mask=inside)
        tl.store(dqkv + row + HALF, y2, mask=inside)
        largest = tl.maximum(largest, tl.maximum(tl.abs(y1.to(tl.float32)), tl.abs(y2.to(tl.float32))))
    tl.store(amax, tl.max(tl.max(largest, 1), 0))
    if NORM:
        tl.store(partial + tl.arange(0, HALF), tl.sum(dw1, 0))
        tl.store(partial + HALF + tl.arange(0, HALF), tl.sum(dw2, 0))


@triton.jit
def _copied_backward(
    dv, dqkv, amax, first, COUNT, tokens,
    ROW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for value heads, whose gradient is only copied."""
    head = first + tl.arange(0, BLOCK)[:, None]
    at, inside = head * D + tl.arange(0, D)[None, :], head < COUNT
    largest = tl.zeros((BLOCK, D), tl.float32)
    for index in tl.range(tl.program_id(1), tokens, tl.num_programs(1)):
        token = tl.cast(index, tl.int64)
        x = tl.load(dv + token * COUNT * D + at, mask=inside, other=0.0)
        tl.store(dqkv + token * ROW + at, x, mask=inside)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    tl.store(amax, tl.max(tl.max(largest, 1), 0))


@triton.jit
def _heads_backward(
    qkv, dq, dk, dv, q_weight, k_weight, cos, sin, dqkv, partial, amax, tokens, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program keeps its heads, all of one kind, and walks over tokens: program_id(0) says which block of
    heads, program_id(1) which token is first. partial (programs, 2, D): of q's weight, then k's."""
    D: tl.constexpr = 2 * HALF
    ROW: tl.constexpr = (H + 2 * K) * D
    K_BEGIN: tl.constexpr = (H + BLOCK - 1) // BLOCK  # blocks before those of k
    V_BEGIN: tl.constexpr = K_BEGIN + (K + BLOCK - 1) // BLOCK
    block = tl.program_id(0)
    program = tl.program_id(1) * tl.num_programs(0) + block
    amax += program
    partial += program * 2 * D
    if NORM:  # the part of the weight that these heads do not have, or both
        nothing = tl.zeros((D,), tl.float32)
        tl.store(partial + tl.arange(0, D), nothing, mask=block >= K_BEGIN)
        tl.store(partial + D + tl.arange(0, D), nothing, mask=(block < K_BEGIN) | (block >= V_BEGIN))
    if block < K_BEGIN:
        _rotated_backward(
            qkv, dq, q_weight, cos, sin, dqkv, partial, amax, block * BLOCK, H, tokens, T, eps,
            ROW, HALF, NORM, BLOCK, STAGES,
        )  # fmt: skip
    elif block < V_BEGIN:
        _rotated_backward(
            qkv + H * D, dk, k_weight, cos, sin, dqkv + H * D, partial + D, amax,
            (block - K_BEGIN) * BLOCK, K, tokens, T, eps,
            ROW, HALF, NORM, BLOCK, STAGES,
        )  # fmt: skip
    else:
        _copied_backward(dv, dqkv + (H + K) * D, amax, (block - V_BEGIN) * BLOCK, K, tokens, ROW, D, BLOCK)


def triton_heads(qkv, q_weight, k_weight, cos, sin, H: int, K: int, eps: float):
    """qkv (B, T, (H + 2K) D), weights (D,) or None, cos and sin (T, D/2) fp32
    -> q (B, T, H, D) and k (B, T, K, D). v is what qkv has of it."""
    B, T, D = qkv.shape[0], qkv.shape[1], 2 * cos.shape[1]
    q, k = (torch.empty(B, T, heads, D, dtype=qkv.dtype, device=qkv.device) for heads in (H, K))
    norm = q_weight is not None
    _heads_forward[(B * T,)](
        qkv, q, k, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, T, eps,
        H=H, K=K, HALF=D // 2, NORM=norm, BLOCK=HEADS_BLOCK, num_warps=4,
    )  # fmt: skip
    return q, k


def triton_heads_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps: float):
    """Gradients of q, k, v -> dqkv, its largest magnitude, and the norm weights' gradients (2, D) fp32, q
    then k; (2, 0) without norm, where qkv may be None."""
    B, T, H, D = dq.shape
    K, norm = dk.shape[2], q_weight is not None
    blocks = triton.cdiv(H, HEADS_BLOCK) + 2 * triton.cdiv(K, HEADS_BLOCK)
    walkers = min(triton.cdiv(walking_programs(dq.device, HEADS_PROGRAMS), blocks), B * T)
    dqkv = torch.empty(B, T, (H + 2 * K) * D, dtype=dq.dtype, device=dq.device)
    partial = torch.empty(walkers * blocks, 2, D if norm else 0, dtype=torch.float32, device=dq.device)
    amax = torch.empty(walkers * blocks, dtype=torch.float32, device=dq.device)
    _heads_backward[(blocks, walkers)](
        qkv if norm else dq, dq, dk, dv, q_weight if norm else dq, k_weight if norm else dq,
        cos, sin, dqkv, partial, amax, B * T, T, eps,
        H=H, K=K, HALF=D // 2, NORM=norm, BLOCK=HEADS_BLOCK, STAGES=HEADS_STAGES, num_warps=4,
    )  # fmt: skip
    dweights, largest = sum_parts(partial, amax)
    return dqkv, largest, dweights
