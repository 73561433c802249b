"""AdamW's update of one tensor on a GPU, in one pass that also writes the working copy of the weight.

Its plain form is torch's: Kingma and Ba 2015, alg. 1, with the weight decay of Loshchilov and Hutter 2019,
alg. 2. Bytes of a parameter, if all is fp32 but for a working copy in bf16:

    apart       28 for the update (reads weight, gradient and moments, writes all but the gradient),
                4 because torch's fused kernel writes the scaled gradient back, 6 for the copy: 38
    one pass    28 for the update, 2 for the copy: 30
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4  # as fast on an H200 as 8 warps, and faster than blocks of 2048 and 4096


class Scalars(NamedTuple):
    """What the kernel reads on the device, so that nothing waits and a capture follows changes: 0-d fp32."""

    rate: torch.Tensor
    grad_scale: torch.Tensor  # divides the gradient
    found_inf: torch.Tensor  # 1: nothing is written
    correction1: torch.Tensor  # 1 - beta1^step
    root2: torch.Tensor  # sqrt(1 - beta2^step)


# Scalars may be views into one tensor. Their alignment is of no use, and each one would be compiled anew.
@triton.jit(do_not_specialize_on_alignment=Scalars._fields)
def _adamw(
    weight, gradient, mean, square, copy, rate, grad_scale, found_inf, correction1, root2, n,
    beta1, rest1, beta2, rest2, eps, decay, COPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rest1, rest2: 1 - beta, which in fp32 would not be exact if it were computed here."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if tl.load(found_inf) == 0:
        step_size = tl.load(rate)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) / tl.load(grad_scale)
        m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        w -= step_size * decay * w
        w -= (step_size / tl.load(correction1)) * m / (tl.sqrt(v) / tl.load(root2) + eps)
        stored = w.to(weight.dtype.element_ty)
        tl.store(weight + at, stored, mask=inside)
        tl.store(mean + at, m.to(mean.dtype.element_ty), mask=inside)
        tl.store(square + at, v.to(square.dtype.element_ty), mask=inside)
        if COPY:  # as rounded: a copy made after loading would see nothing else
            tl.store(copy + at, stored.to(copy.dtype.element_ty), mask=inside)


def triton_adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    copy: torch.Tensor | None,
    scalars: Scalars,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> None:
    """Updates weight, mean and square in place, and writes the weight to `copy`, if there is one. All have
    the same shape and are contiguous, each in a dtype of its own; rounding is to nearest."""
    n = weight.numel()
    tensors = [weight, gradient, mean, square, weight if copy is None else copy]
    assert all(t.is_contiguous() and t.numel() == n for t in tensors), [
        (t.shape, t.stride()) for t in tensors
    ]
    if not n:
        return  # this rank may have no row of a sharded matrix
    beta1, beta2 = betas
    _adamw[(-(-n // BLOCK),)](  # triton.cdiv takes the host as long as all the rest of this function
        *tensors, *scalars, n, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay,
        COPY=copy is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
