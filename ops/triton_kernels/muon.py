"""The two elementwise passes of Muon's update of one tensor on a GPU (training/optimization/muon.py), before
and after the orthogonalization. Bytes of a parameter, if all is fp32 but what is orthogonalized and the copy:

    blend     14: reads gradient and momentum, writes momentum and the blend of both
    apply     12: reads weight and direction, writes weight and working copy
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.adamw import BLOCK, OF_A_COUNTER, WARPS, rounded

SCALARS = ["rate", "grad_scale", "found_inf", "step", "key"]  # views, whose alignment is of no use


@triton.jit(do_not_specialize_on_alignment=SCALARS)
def _blend(gradient, momentum, blend, grad_scale, found_inf, n, rest, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) / tl.load(grad_scale)
    m = tl.load(momentum + at, mask=inside, other=0.0)
    m += rest * (g - m)
    tl.store(blend + at, (m - rest * (m - g)).to(blend.dtype.element_ty), mask=inside)
    if tl.load(found_inf) == 0:
        tl.store(momentum + at, m, mask=inside)


@triton.jit(do_not_specialize_on_alignment=SCALARS, do_not_specialize=["first"])
def _apply(
    weight, direction, copy, rate, found_inf, step, key, n, first, skipped, scale, decay,
    COPY: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = tl.program_id(0).to(tl.int64) * (BLOCK // OF_A_COUNTER) + tl.arange(0, BLOCK // OF_A_COUNTER)
    counter = (first + counter).to(tl.uint32)
    inside = at < n
    if STOCHASTIC:
        at -= skipped
        inside = (at >= 0) & (at < n)
    if tl.load(found_inf) == 0:
        step_size = tl.load(rate)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        w -= step_size * decay * w
        w -= step_size * scale * tl.load(direction + at, mask=inside, other=0.0).to(tl.float32)
        stored = rounded(w, weight.dtype.element_ty, key, step, 0, counter, STOCHASTIC)
        tl.store(weight + at, stored, mask=inside)
        if COPY:
            tl.store(copy + at, stored.to(copy.dtype.element_ty), mask=inside)


def triton_blend(
    gradient: torch.Tensor,
    momentum: torch.Tensor,
    blend: torch.Tensor,
    mu: float,
    grad_scale: torch.Tensor,
    found_inf: torch.Tensor,
) -> None:
    """momentum <- mu momentum + (1 - mu) g, unless found_inf is 1; blend <- mu momentum + (1 - mu) g with
    the new momentum (Nesterov's). g is gradient / grad_scale. All of one shape and contiguous, momentum in
    fp32."""
    n = gradient.numel()
    assert all(t.is_contiguous() and t.numel() == n for t in (gradient, momentum, blend))
    if n:
        _blend[(-(-n // BLOCK),)](
            gradient, momentum, blend, grad_scale, found_inf, n, 1 - mu, BLOCK=BLOCK, num_warps=WARPS
        )  # fmt: skip


def triton_apply(
    weight: torch.Tensor,
    direction: torch.Tensor,
    copy: torch.Tensor | None,
    rate: torch.Tensor,
    scale: float,
    decay: float,
    found_inf: torch.Tensor,
    step: torch.Tensor,
    rounding: tuple[torch.Tensor, int] | None = None,
) -> None:
    """weight <- (1 - rate decay) weight - rate scale direction, unless found_inf is 1; writes it to `copy`,
    if there is one. All of one shape and contiguous. rounding: as for triton_adamw()."""
    n = weight.numel()
    tensors = [weight, direction, weight if copy is None else copy]
    assert all(t.is_contiguous() and t.numel() == n for t in tensors), [t.stride() for t in tensors]
    if not n:
        return
    key, start = rounding or (None, 0)
    first, skipped = divmod(start, OF_A_COUNTER.value)
    _apply[(-(-(n + skipped) // BLOCK),)](
        *tensors, rate, found_inf, step, key, n, first, skipped, scale, decay,
        COPY=copy is not None, STOCHASTIC=rounding is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
