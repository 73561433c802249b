"""Triton kernels for the parts of a step that memory bandwidth limits. ops/heads.py calls them on a GPU and says
what they compute; each reads its inputs and writes its outputs once, which compiled PyTorch did not (LOG.md).

Every kernel computes in fp32, whatever its tensors are stored in, and adds in a fixed order.

    N tokens · F feed-forward width · V vocabulary · H, K query and key/value heads · D head width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.heads import AMAX_COLUMNS, amax_parts

# --- residual sum and RMSNorm ---

NORM_PROGRAMS = 528  # of the backward, 4 on each multiprocessor of an H200; each sums its part of dweight


@triton.jit
def _add_rms_norm_forward(x, delta, weight, total, normed, amax, C, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    at = row * C + column
    sums = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    sums += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    stored = sums.to(total.dtype.element_ty)
    tl.store(total + at, stored, mask=inside)
    sums = stored.to(tl.float32)  # as rounded: the backward will see nothing else
    scale = tl.rsqrt(tl.sum(sums * sums, 0) / C + eps)
    y = sums * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    y = y.to(normed.dtype.element_ty)
    tl.store(normed + at, y, mask=inside)
    tl.store(amax + row, tl.max(tl.abs(y.to(tl.float32)), 0))


@triton.jit
def _add_rms_norm_backward(total, dnormed, dtotal, weight, dx, partial, rows, C, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    inside = column < C
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row.to(tl.int64) * C + column
        sums = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        dn = tl.load(dnormed + at, mask=inside, other=0.0).to(tl.float32)
        ds = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(sums * sums, 0) / C + eps)
        n = sums * scale
        dweight += dn * n
        dn *= w
        tl.store(dx + at, ds + scale * (dn - n * (tl.sum(dn * n, 0) / C)), mask=inside)
    tl.store(partial + tl.program_id(0) * C + column, dweight, mask=inside)


def add_rms_norm_forward(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float):
    """x, delta (N, C) -> their sum, its RMSNorm, and the largest magnitude of each row of that (N,) fp32."""
    N, C = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    amax = torch.empty(N, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(C)
    _add_rms_norm_forward[(N,)](x, delta, weight, total, normed, amax, C, eps, BLOCK=block, num_warps=4)
    return total, normed, amax


def add_rms_norm_backward(total, dnormed, dtotal, weight, eps: float):
    """Gradients of the norm and of the sum (N, C) -> dx, which is ddelta too, and dweight (C,) fp32."""
    N, C = total.shape
    dx = torch.empty_like(total)
    programs = min(NORM_PROGRAMS, N)
    partial = torch.empty(programs, C, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(C)
    _add_rms_norm_backward[(programs,)](
        total, dnormed, dtotal, weight, dx, partial, N, C, eps, BLOCK=block, num_warps=8
    )
    return dx, partial.sum(0)


# --- SwiGLU ---


@triton.jit
def _swiglu_forward(x, h, amax, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    y = (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty)
    tl.store(h + row * F + column, y, mask=inside)
    tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), tl.max(tl.abs(y.to(tl.float32)), 0))


@triton.jit
def _swiglu_backward(x, dh, dx, amax, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    gate = tl.load(x + row * 2 * F + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * F + F + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh + row * F + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = (d * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dx.dtype.element_ty)
    dup = (d * gate * sigmoid).to(dx.dtype.element_ty)
    tl.store(dx + row * 2 * F + column, dgate, mask=inside)
    tl.store(dx + row * 2 * F + F + column, dup, mask=inside)
    largest = tl.max(tl.maximum(tl.abs(dgate.to(tl.float32)), tl.abs(dup.to(tl.float32))), 0)
    tl.store(amax + row * tl.num_programs(1) + tl.program_id(1), largest)


def swiglu_forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, 2F), gate then up -> silu(gate) * up (N, F), and the largest magnitudes of its parts."""
    N, F = x.shape[0], x.shape[1] // 2
    h = torch.empty(N, F, dtype=x.dtype, device=x.device)
    amax = torch.empty(N, amax_parts(F), dtype=torch.float32, device=x.device)
    _swiglu_forward[tuple(amax.shape)](x, h, amax, F, BLOCK=AMAX_COLUMNS)
    return h, amax


def swiglu_backward(x: torch.Tensor, dh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dh (N, F) -> dx (N, 2F), and the largest magnitudes of its parts."""
    N, F = dh.shape
    dx = torch.empty_like(x)
    amax = torch.empty(N, amax_parts(F), dtype=torch.float32, device=x.device)
    _swiglu_backward[tuple(amax.shape)](x, dh, dx, amax, F, BLOCK=AMAX_COLUMNS)
    return dx, amax


# --- query, key and value heads: QK-norm and rotary positions ---

# A token's rows of qkv lie in order: H query, K key, K value heads of D. A program takes HEADS_BLOCK of them,
# so that it reads the angles once.
HEADS_BLOCK = 32
HEADS_PROGRAMS = 1056  # of the backward, 8 on each multiprocessor of an H200; each sums its part of dweight


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
        token = index.to(tl.int64)
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


def heads_forward(qkv, q_weight, k_weight, cos, sin, H: int, K: int, eps: float):
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


def heads_backward(dq, dk, dv, qkv, q_weight, k_weight, cos, sin, eps: float):
    """Gradients of q, k, v -> dqkv, its largest magnitude, and the norm weights' gradients (2, D) fp32, q
    then k; (2, 0) without norm."""
    B, T, H, D = dq.shape
    K, norm = dk.shape[2], q_weight is not None
    parts = triton.cdiv(H + 2 * K, HEADS_BLOCK)
    grid = min(triton.cdiv(HEADS_PROGRAMS, parts), B * T), parts
    dqkv = torch.empty_like(qkv)
    programs = grid[0] * grid[1]
    partial = torch.empty(programs, 2, D if norm else 0, dtype=torch.float32, device=qkv.device)
    amax = torch.empty(programs, dtype=torch.float32, device=qkv.device)
    _heads_backward[grid](
        qkv, dq, dk, dv, q_weight if norm else qkv, k_weight if norm else qkv, cos, sin, dqkv, partial, amax,
        B * T, T, eps, H=H, K=K, HALF=D // 2, NORM=norm, BLOCK=HEADS_BLOCK,
    )  # fmt: skip
    return dqkv, amax.amax(), partial.sum(0)


# --- cross-entropy ---

LOSS_BLOCK = 4096


@triton.jit
def _cross_entropy(logits, targets, losses, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
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


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Losses (N,) fp32 of logits (N, V), 0 for a negative target; with gradient=True the logits become
    softmax - one_hot, or 0: in place, so there is no second (N, V) tensor."""
    N, V = logits.shape
    losses = torch.empty(N, dtype=torch.float32, device=logits.device)
    block = min(LOSS_BLOCK, triton.next_power_of_2(V))
    _cross_entropy[(N,)](logits, targets, losses, V, GRADIENT=gradient, BLOCK=block, num_warps=8)
    return losses


# --- embedding ---

EMBEDDING_BLOCK, EMBEDDING_ROWS = 512, 16  # columns of a program, rows that it adds at a time


@triton.jit
def _add_embedding_gradient(sorted_ids, order, dy, total, N, C, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    first = tl.program_id(0)
    token = tl.load(sorted_ids + first)
    before = tl.load(sorted_ids + tl.maximum(first - 1, 0))
    if (first == 0) | (before != token):  # else another program has this token
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
        sums = tl.zeros((BLOCK,), tl.float32)
        i = first
        more = 1
        while more > 0:
            at = i + tl.arange(0, ROWS)
            same = tl.load(sorted_ids + at, mask=at < N, other=-1) == token
            rows = tl.load(order + at, mask=same, other=0)[:, None]
            part = tl.load(dy + rows * C + column, mask=same[:, None] & (column < C), other=0.0)
            sums += tl.sum(part.to(tl.float32), 0)
            more = tl.min(same.to(tl.int32), 0)  # 0 if these were the last
            i += ROWS
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        at = total + token * C + column
        tl.store(at, tl.load(at, mask=column < C, other=0.0) + sums, mask=column < C)


def add_embedding_gradient(ids: torch.Tensor, dy: torch.Tensor, total: torch.Tensor) -> None:
    """total (V, C) fp32, row ids[n], += dy[n] (N, C), in the order of n. Only rows that occur are touched."""
    N, C = dy.shape
    sorted_ids, order = ids.sort(stable=True)
    grid = N, triton.cdiv(C, EMBEDDING_BLOCK)
    _add_embedding_gradient[grid](
        sorted_ids, order, dy, total, N, C, BLOCK=EMBEDDING_BLOCK, ROWS=EMBEDDING_ROWS
    )
