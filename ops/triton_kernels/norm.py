"""ops/norm.py on a GPU: residual sum and norm in one pass, and their backward in another.

N tokens · C width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.launch import walking_programs
from ops.triton_kernels.sum_parts import sum_parts

# Programs of the backward on each multiprocessor; each sums its part of dweight. At a width of 2048 they are
# all resident: 4 warps of 128 registers a thread or fewer, and 12 KiB, compiled for 8.0, 8.9, 9.0 or 10.0.
NORM_PROGRAMS = 4
# What a program of the backward may load into shared memory ahead of its work. Four programs fit into a
# multiprocessor of an H200, two into one of an RTX 4090.
STAGED_BYTES = 48 * 1024


@triton.jit
def _add_norm_forward(
    x, delta, weight, bias, total, normed, amax, rows, N, C, eps,
    CENTERED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, AGAIN: tl.constexpr = False,
):  # fmt: skip
    """AGAIN: x is total already, and only normed is written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < C
    at = row * C + column
    sums = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if not AGAIN:
        sums += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        stored = sums.to(total.dtype.element_ty)
        tl.store(total + at, stored, mask=inside)
        sums = stored.to(tl.float32)  # as rounded: the backward will see nothing else
    if CENTERED:
        mean = tl.div_rn(tl.sum(sums, 0), tl.cast(C, tl.float32))  # rounded: else some compilations fuse it
        if not AGAIN:
            tl.store(rows + row, mean)
        sums = tl.where(inside, sums - mean, 0.0)
    scale = tl.rsqrt(tl.div_rn(tl.sum(sums * sums, 0), tl.cast(C, tl.float32)) + eps)
    if not AGAIN:
        tl.store(rows + N + row, scale)
    y = sums * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    y = y.to(normed.dtype.element_ty)
    tl.store(normed + at, y, mask=inside)
    if not AGAIN:
        tl.store(amax + row, tl.max(tl.abs(y.to(tl.float32)), 0))


@triton.jit
def _add_norm_backward(
    total, dnormed, dtotal, weight, rows, dx, partial, amax, N, C,
    CENTERED: tl.constexpr, BIAS: tl.constexpr, AMAX: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < C
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), N, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(row, tl.int64) * C + column
        n = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        dn = tl.load(dnormed + at, mask=inside, other=0.0).to(tl.float32)
        ds = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rows + N + row)
        if CENTERED:
            n -= tl.load(rows + row)
        n *= scale
        dweight += dn * n
        if BIAS:
            dbias += dn
        dn *= w
        d = dn - n * (tl.sum(dn * n, 0) / C)
        if CENTERED:
            d -= tl.sum(dn, 0) / C
        d = ds + scale * d
        tl.store(dx + at, d, mask=inside)
        if AMAX:
            largest = tl.maximum(largest, tl.abs(tl.where(inside, d, 0.0)) if CENTERED else tl.abs(d))
    partial += tl.program_id(0) * (C + C * BIAS) + column
    tl.store(partial, dweight, mask=inside)
    if BIAS:
        tl.store(partial + C, dbias, mask=inside)
    if AMAX:  # rounding keeps order, so this is the largest of what was stored
        tl.store(amax + tl.program_id(0), tl.max(largest, 0).to(dx.dtype.element_ty).to(tl.float32))


def triton_add_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
):
    """x, delta (N, C), weight and bias (C,) -> their sum, its norm, the largest magnitude of each row of that
    (N,) fp32, and each row's mean, not written unless centered, and factor (2, N) fp32."""
    N, C = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    amax = torch.empty(N, dtype=torch.float32, device=x.device)
    rows = torch.empty(2, N, dtype=torch.float32, device=x.device)
    _add_norm_forward[(N,)](
        x, delta, weight, weight if bias is None else bias, total, normed, amax, rows, N, C, eps,
        CENTERED=centered, BIAS=bias is not None, BLOCK=triton.next_power_of_2(C), num_warps=4,
    )  # fmt: skip
    return total, normed, amax, rows


def triton_norm(
    total: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centered: bool
) -> torch.Tensor:
    """The norm that triton_add_norm made of this sum (N, C), by the same instructions."""
    N, C = total.shape
    normed, unused = torch.empty_like(total), total
    _add_norm_forward[(N,)](
        total, unused, weight, weight if bias is None else bias, unused, normed, unused, unused, N, C, eps,
        CENTERED=centered, BIAS=bias is not None, BLOCK=triton.next_power_of_2(C), AGAIN=True, num_warps=4,
    )  # fmt: skip
    return normed


def triton_add_norm_backward(
    total: torch.Tensor,
    dnormed: torch.Tensor,
    dtotal: torch.Tensor,
    weight: torch.Tensor,
    rows: torch.Tensor,
    centered: bool,
    bias: bool,
    amax: bool,
):
    """Gradients of the norm and of the sum (N, C), and the forward's rows -> dx, which is ddelta too, the
    gradients of weight and, if there is one, bias (1 or 2, C) fp32, and dx's largest magnitude, () fp32, if
    it is wanted."""
    N, C = total.shape
    dx = torch.empty_like(total)
    programs = min(walking_programs(total.device, NORM_PROGRAMS), N)
    partial = torch.empty(programs, 1 + bias, C, dtype=torch.float32, device=total.device)
    largest = torch.empty(programs, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(C)
    stages, warps = _stages_and_warps(block, total.itemsize)
    _add_norm_backward[(programs,)](
        total, dnormed, dtotal, weight, rows, dx, partial, largest, N, C,
        CENTERED=centered, BIAS=bias, AMAX=amax, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, *sum_parts(partial, largest if amax else None)


def _stages_and_warps(block: int, itemsize: int) -> tuple[int, int]:
    """Measured at widths of 1536, 2048, 2304 and 4096 on an H200, and of 768 to 2048 on an H100 (LOG.md).
    Stages: rows of three tensors in shared memory, and the one that is computed."""
    if block > 4096:
        return 1, 8
    wanted = 2 if block == 2048 else 3
    return min(wanted, 1 + STAGED_BYTES // (3 * block * itemsize)), 4
