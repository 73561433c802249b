"""ops/heads.py on a GPU: QK-norm or the bias, and rotary positions, on the fused qkv, and their backward.

B batch · T sequence · H query heads · K key/value heads · D head width, HALF = D/2
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.launch import walking_programs
from ops.triton_kernels.sum_parts import sum_parts

# A token's rows of qkv lie in order: H query, K key, K value heads of D. A program works on a block of heads
# of one kind at a time, 8 of 128 or 16 of 64; masks leave out what is beyond their number.
HEADS_WIDTH = 1024
# Programs of the backward on each multiprocessor; each sums its part of the weights' gradient. They are all
# resident: 4 warps of 64 registers a thread or fewer, compiled for 8.0, 8.9, 9.0 or 10.0.
HEADS_PROGRAMS = 6
HEADS_STAGES = 3  # the backward loads two tokens while it computes the one before


@triton.jit
def _normalized(x1, x2, eps, HALF: tl.constexpr):
    """Both halves of rows divided by their root mean square, and the factor."""
    scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    return x1 * scale, x2 * scale, scale


@triton.jit
def _with_bias(rows, bias, at, inside, BIAS: tl.constexpr):
    """What rows have there, fp32, and the bias added as PyTorch rounds it."""
    x = tl.load(rows + at, mask=inside, other=0.0)
    if BIAS:
        added = x.to(tl.float32) + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        x = added.to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def _rotate_heads(
    token_rows, out, weight, bias, c, s, eps,
    COUNT: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The COUNT heads of one token, from token_rows to out."""
    d = tl.arange(0, HALF)[None, :]
    if NORM:
        w1, w2 = tl.load(weight + d).to(tl.float32), tl.load(weight + HALF + d).to(tl.float32)
    for first in tl.static_range(0, COUNT, BLOCK):
        head = first + tl.arange(0, BLOCK)[:, None]
        at, inside = head * (2 * HALF) + d, head < COUNT
        x1 = _with_bias(token_rows, bias, at, inside, BIAS)
        x2 = _with_bias(token_rows, bias, at + HALF, inside, BIAS)
        if NORM:
            x1, x2, _ = _normalized(x1, x2, eps, HALF)
            x1 *= w1
            x2 *= w2
        tl.store(out + at, x1 * c - x2 * s, mask=inside)
        tl.store(out + at + HALF, x2 * c + x1 * s, mask=inside)


@triton.jit
def _heads_forward(
    qkv, bias, q, k, v, q_weight, k_weight, cos, sin, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program has one token, so that it reads the angles once. v is written where there is no norm."""
    D: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    rows = qkv + token * (H + 2 * K) * D
    angle = (token % T) * HALF + tl.arange(0, HALF)[None, :]
    c, s = tl.load(cos + angle), tl.load(sin + angle)
    _rotate_heads(rows, q + token * H * D, q_weight, bias, c, s, eps, H, HALF, NORM, BIAS, BLOCK)
    rows += H * D
    bias += H * D
    _rotate_heads(rows, k + token * K * D, k_weight, bias, c, s, eps, K, HALF, NORM, BIAS, BLOCK)
    if not NORM:
        for first in tl.static_range(0, K, BLOCK):
            head = first + tl.arange(0, BLOCK)[:, None]
            at, inside = head * D + tl.arange(0, D)[None, :], head < K
            x = _with_bias(rows + K * D, bias + K * D, at, inside, BIAS)
            tl.store(v + token * K * D + at, x, mask=inside)


@triton.jit
def _rotated_backward(
    qkv, dy, weight, cos, sin, dqkv, partial, amax, first, COUNT, tokens, T, eps,
    ROW: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Heads first to first + BLOCK of the COUNT that dy has, of every num_programs(1)-th token. qkv and dqkv
    begin where those COUNT heads begin in a token's ROW of columns. partial has dweight's part (D,), or that
    of the gradient of these heads' bias (COUNT, D)."""
    d = tl.arange(0, HALF)[None, :]
    head = first + tl.arange(0, BLOCK)[:, None]
    at, inside = head * (2 * HALF) + d, head < COUNT
    largest = tl.zeros((BLOCK, HALF), tl.float32)
    if NORM:
        w1, w2 = tl.load(weight + d).to(tl.float32), tl.load(weight + HALF + d).to(tl.float32)
    sum1 = tl.zeros((BLOCK, HALF), tl.float32)
    sum2 = tl.zeros((BLOCK, HALF), tl.float32)
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
            sum1 += dn1 * n1
            sum2 += dn2 * n2
            dn1 *= w1
            dn2 *= w2
            along = (tl.sum(dn1 * n1 + dn2 * n2, 1) / (2 * HALF))[:, None]
            dn1, dn2 = scale * (dn1 - n1 * along), scale * (dn2 - n2 * along)
        y1, y2 = dn1.to(dqkv.dtype.element_ty), dn2.to(dqkv.dtype.element_ty)
        tl.store(dqkv + row, y1, mask=inside)
        tl.store(dqkv + row + HALF, y2, mask=inside)
        y1, y2 = y1.to(tl.float32), y2.to(tl.float32)
        largest = tl.maximum(largest, tl.maximum(tl.abs(y1), tl.abs(y2)))
        if BIAS:
            sum1 += y1
            sum2 += y2
    tl.store(amax, tl.max(tl.max(largest, 1), 0))
    if NORM:
        tl.store(partial + tl.arange(0, HALF), tl.sum(sum1, 0))
        tl.store(partial + HALF + tl.arange(0, HALF), tl.sum(sum2, 0))
    if BIAS:
        tl.store(partial + at, sum1, mask=inside)
        tl.store(partial + at + HALF, sum2, mask=inside)


@triton.jit
def _copied_backward(
    dv, dqkv, partial, amax, first, COUNT, tokens,
    ROW: tl.constexpr, D: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for value heads, whose gradient is only copied."""
    head = first + tl.arange(0, BLOCK)[:, None]
    at, inside = head * D + tl.arange(0, D)[None, :], head < COUNT
    largest = tl.zeros((BLOCK, D), tl.float32)
    total = tl.zeros((BLOCK, D), tl.float32)
    for index in tl.range(tl.program_id(1), tokens, tl.num_programs(1)):
        token = tl.cast(index, tl.int64)
        x = tl.load(dv + token * COUNT * D + at, mask=inside, other=0.0)
        tl.store(dqkv + token * ROW + at, x, mask=inside)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        total += x.to(tl.float32)
    tl.store(amax, tl.max(tl.max(largest, 1), 0))
    if BIAS:
        tl.store(partial + at, total, mask=inside)


@triton.jit
def _heads_backward(
    qkv, dq, dk, dv, q_weight, k_weight, cos, sin, dqkv, partial, amax, tokens, T, eps,
    H: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program keeps its heads, all of one kind, and walks over tokens: program_id(0) says which block of
    heads, program_id(1) which token is first. partial: with norms (programs, 2, D), of q's weight, then k's;
    with a bias (num_programs(1), ROW)."""
    D: tl.constexpr = 2 * HALF
    ROW: tl.constexpr = (H + 2 * K) * D
    K_BEGIN: tl.constexpr = (H + BLOCK - 1) // BLOCK  # blocks before those of k
    V_BEGIN: tl.constexpr = K_BEGIN + (K + BLOCK - 1) // BLOCK
    block = tl.program_id(0)
    program = tl.program_id(1) * tl.num_programs(0) + block
    amax += program
    k_partial, v_partial = partial, partial
    if BIAS:
        partial += tl.program_id(1) * ROW
        k_partial, v_partial = partial + H * D, partial + (H + K) * D
    if NORM:  # the part of the weight that these heads do not have, or both
        partial += program * 2 * D
        k_partial = partial + D
        nothing = tl.zeros((D,), tl.float32)
        tl.store(partial + tl.arange(0, D), nothing, mask=block >= K_BEGIN)
        tl.store(k_partial + tl.arange(0, D), nothing, mask=(block < K_BEGIN) | (block >= V_BEGIN))
    if block < K_BEGIN:
        _rotated_backward(
            qkv, dq, q_weight, cos, sin, dqkv, partial, amax, block * BLOCK, H, tokens, T, eps,
            ROW, HALF, NORM, BIAS, BLOCK, STAGES,
        )  # fmt: skip
    elif block < V_BEGIN:
        _rotated_backward(
            qkv + H * D, dk, k_weight, cos, sin, dqkv + H * D, k_partial, amax,
            (block - K_BEGIN) * BLOCK, K, tokens, T, eps,
            ROW, HALF, NORM, BIAS, BLOCK, STAGES,
        )  # fmt: skip
    else:
        _copied_backward(
            dv, dqkv + (H + K) * D, v_partial, amax, (block - V_BEGIN) * BLOCK, K, tokens, ROW, D, BIAS, BLOCK
        )


def triton_heads(qkv, bias, q_weight, k_weight, cos, sin, H: int, K: int, eps: float):
    """qkv (B, T, (H + 2K) D), bias ((H + 2K) D,) or weights (D,) or neither, cos and sin (T, D/2) fp32
    -> q (B, T, H, D), k and v (B, T, K, D). With weights, v is what qkv has of it, and not written."""
    B, T, D = qkv.shape[0], qkv.shape[1], 2 * cos.shape[1]
    norm, biased = q_weight is not None, bias is not None
    counts = H, K, 0 if norm else K
    q, k, v = (torch.empty(B, T, heads, D, dtype=qkv.dtype, device=qkv.device) for heads in counts)
    _heads_forward[(B * T,)](
        qkv, bias if biased else qkv, q, k, v, q_weight if norm else qkv, k_weight if norm else qkv,
        cos, sin, T, eps,
        H=H, K=K, HALF=D // 2, NORM=norm, BIAS=biased, BLOCK=max(HEADS_WIDTH // D, 1), num_warps=4,
    )  # fmt: skip
    return q, k, v


def triton_heads_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps: float, bias: bool = False):
    """Gradients of q, k, v -> dqkv, its largest magnitude, and gradients in fp32: with norms those of their
    weights (2, D), q's and k's, with a bias its own ((H + 2K) D,), else (0,). Only norms need qkv."""
    B, T, H, D = dq.shape
    K, width, norm = dk.shape[2], (H + 2 * dk.shape[2]) * D, q_weight is not None
    block = max(HEADS_WIDTH // D, 1)
    blocks = triton.cdiv(H, block) + 2 * triton.cdiv(K, block)
    walkers = min(triton.cdiv(walking_programs(dq.device, HEADS_PROGRAMS), blocks), B * T)
    parts = (walkers * blocks, 2, D) if norm else (walkers, width if bias else 0)
    dqkv = torch.empty(B, T, width, dtype=dq.dtype, device=dq.device)
    partial, amax = (dq.new_empty(size, dtype=torch.float32) for size in (parts, walkers * blocks))
    _heads_backward[(blocks, walkers)](
        qkv if norm else dq, dq, dk, dv, q_weight if norm else dq, k_weight if norm else dq,
        cos, sin, dqkv, partial, amax, B * T, T, eps,
        H=H, K=K, HALF=D // 2, NORM=norm, BIAS=bias, BLOCK=block, STAGES=HEADS_STAGES, num_warps=4,
    )  # fmt: skip
    sums, largest = sum_parts(partial, amax)
    return dqkv, largest, sums
