"""ops/rms_norm.py on a GPU: residual sum and RMSNorm in one pass, and their backward in another.

N tokens · C width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.launch import walking_programs

# Programs of the backward on each multiprocessor; each sums its part of dweight. At a width of 2048 they are
# all resident: 4 warps of 104 registers a thread or fewer, and 12 KiB, compiled for 8.0, 8.9, 9.0 or 10.0.
NORM_PROGRAMS = 4
# Up to this width, the backward loads a row into shared memory while it computes the row before (two stages).
# A wider row of three tensors could be more than a multiprocessor has, so the kernel's loads wait for it.
STAGED_WIDTH = 2048


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
def _add_rms_norm_backward(
    total, dnormed, dtotal, weight, dx, partial, amax, rows, C, eps, AMAX: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < C
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    largest = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(row, tl.int64) * C + column
        sums = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        dn = tl.load(dnormed + at, mask=inside, other=0.0).to(tl.float32)
        ds = tl.load(dtotal + at, mask=inside, other=0.0).to(tl.float32)
        # neither sum needs the other: the mean of dn * w * n is scale times the second
        squares, along = tl.sum(sums * sums, 0) / C, tl.sum(sums * dn * w, 0) / C
        scale = tl.rsqrt(squares + eps)
        n = sums * scale
        dweight += dn * n
        d = ds + scale * (dn * w - n * (scale * along))
        tl.store(dx + at, d, mask=inside)
        if AMAX:
            largest = tl.maximum(largest, tl.abs(d))
    tl.store(partial + tl.program_id(0) * C + column, dweight, mask=inside)
    if AMAX:  # rounding keeps order, so this is the largest of what was stored
        tl.store(amax + tl.program_id(0), tl.max(largest, 0).to(dx.dtype.element_ty).to(tl.float32))


def triton_add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float):
    """x, delta (N, C) -> their sum, its RMSNorm, and the largest magnitude of each row of that (N,) fp32."""
    N, C = x.shape
    total, normed = torch.empty_like(x), torch.empty_like(x)
    amax = torch.empty(N, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(C)
    _add_rms_norm_forward[(N,)](x, delta, weight, total, normed, amax, C, eps, BLOCK=block, num_warps=4)
    return total, normed, amax


def triton_add_rms_norm_backward(total, dnormed, dtotal, weight, eps: float, amax: bool = False):
    """Gradients of the norm and of the sum (N, C) -> dx, which is ddelta too, dweight (C,) fp32, and dx's
    largest magnitude, () fp32, if amax."""
    N, C = total.shape
    dx = torch.empty_like(total)
    programs = min(walking_programs(total.device, NORM_PROGRAMS), N)
    partial = torch.empty(programs, C, dtype=torch.float32, device=total.device)
    largest = torch.empty(programs, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(C)
    stages, warps = (2, 4) if block <= STAGED_WIDTH else (1, 8)
    _add_rms_norm_backward[(programs,)](
        total, dnormed, dtotal, weight, dx, partial, largest, N, C, eps,
        AMAX=amax, BLOCK=block, STAGES=stages, num_warps=warps,
    )  # fmt: skip
    return dx, partial.sum(0), largest.amax() if amax else largest.new_empty(())
