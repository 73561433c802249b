"""ops/swiglu.py on a GPU: SwiGLU and its backward, with the largest magnitudes of what they write.

N tokens · F feed-forward width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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


def triton_swiglu(x: torch.Tensor, amax_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x (N, 2F), gate then up -> silu(gate) * up (N, F), and the largest magnitudes of its parts."""
    N, F = x.shape[0], x.shape[1] // 2
    h = torch.empty(N, F, dtype=x.dtype, device=x.device)
    amax = torch.empty(N, triton.cdiv(F, amax_columns), dtype=torch.float32, device=x.device)
    _swiglu_forward[tuple(amax.shape)](x, h, amax, F, BLOCK=amax_columns, num_warps=8)
    return h, amax


def triton_swiglu_backward(
    x: torch.Tensor, dh: torch.Tensor, amax_columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """dh (N, F) -> dx (N, 2F), and the largest magnitudes of its parts."""
    N, F = dh.shape
    dx = torch.empty_like(x)
    amax = torch.empty(N, triton.cdiv(F, amax_columns), dtype=torch.float32, device=x.device)
    _swiglu_backward[tuple(amax.shape)](x, dh, dx, amax, F, BLOCK=amax_columns, num_warps=8)
    return dx, amax
