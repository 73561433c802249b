"""AdamW's update of one tensor on a GPU, in one pass that also writes the working copy of the weight.

Its plain form, but for last bits, is ops/quantization/adamw.py. Bytes of a parameter, if all is fp32 but for
a working copy in bf16:

    apart       28 for the update (reads weight, gradient and moments, writes all but the gradient),
                4 because torch's fused kernel writes the scaled gradient back, 6 for the copy: 38
    one pass    28 for the update, 2 for the copy: 30

What is stored in bf16 may be rounded stochastically: with the bits of ops/quantization/random_bits.py, which
the kernel computes itself and keeps in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.quantization.adamw import Scalars

BLOCK, WARPS = 1024, 4  # as fast on an H200 as 8 warps, and faster than blocks of 2048 and 4096
OF_A_COUNTER = tl.constexpr(8)  # elements: Philox makes 128 bits, and rounding to bf16 takes 16


@triton.jit
def _random_halves(key, step, stream: tl.constexpr, counter):
    """Counters (n,), uint32 -> int32 (8 n,): 16 random bits for each element."""
    zero = counter * 0
    tensor = zero + (tl.load(key + 3) + (stream << 30)).to(tl.uint32)
    micro_step = zero + tl.load(key + 2).to(tl.uint32)
    iteration = zero + tl.load(step).to(tl.int64).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(key), counter, tensor, micro_step, iteration)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))  # a b c d of the first counter, ..
    return tl.interleave(words & 0xFFFF, words >> 16).to(tl.int32)


@triton.jit
def rounded(x, dtype: tl.constexpr, key, step, stream: tl.constexpr, counter, STOCHASTIC: tl.constexpr):
    """x, fp32, as it is stored: what is bf16, to nearest or stochastically."""
    if STOCHASTIC and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        moved = (bits + _random_halves(key, step, stream, counter)) & -65536
        is_finite = (bits & 0x7F800000) != 0x7F800000
        return tl.where(is_finite, moved, bits).to(tl.float32, bitcast=True).to(dtype)
    return x.to(dtype)


# Scalars may be views into one tensor. Their alignment is of no use, and each one would be compiled anew.
@triton.jit(do_not_specialize_on_alignment=[*Scalars._fields, "key"], do_not_specialize=["first"])
def _adamw(
    weight, gradient, mean, square, copy, rate, grad_scale, found_inf, step, correction1, root2, key, n,
    first, skipped, beta1, rest1, beta2, rest2, eps, decay,
    COPY: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rest1, rest2: 1 - beta, which in fp32 would not be exact if it were computed here. first: the counter
    of the tensor's first element, whose place among the counter's elements is `skipped`."""
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
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) / tl.load(grad_scale)
        m = tl.load(mean + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(square + at, mask=inside, other=0.0).to(tl.float32)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        w -= step_size * decay * w
        w -= (step_size / tl.load(correction1)) * m / (tl.sqrt(v) / tl.load(root2) + eps)
        stored = rounded(w, weight.dtype.element_ty, key, step, 0, counter, STOCHASTIC)
        tl.store(weight + at, stored, mask=inside)
        m = rounded(m, mean.dtype.element_ty, key, step, 1, counter, STOCHASTIC)
        tl.store(mean + at, m, mask=inside)
        v = rounded(v, square.dtype.element_ty, key, step, 2, counter, STOCHASTIC)
        tl.store(square + at, v, mask=inside)
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
    rounding: tuple[torch.Tensor, int] | None = None,
) -> None:
    """Updates weight, mean and square in place, and writes the weight to `copy`, if there is one. All have
    the same shape and are contiguous, each in a dtype of its own.

    rounding: None is to nearest. (key, start) is stochastic where bf16 is stored, with the bits of
    random_bits.weight_key() and of scalars.step; start is the index of the first element in the whole tensor.
    Streams 0, 1 and 2 are for weight, mean and square."""
    n = weight.numel()
    tensors = [weight, gradient, mean, square, weight if copy is None else copy]
    assert all(t.is_contiguous() and t.numel() == n for t in tensors), [
        (t.shape, t.stride()) for t in tensors
    ]
    if not n:
        return  # this rank may have no row of a sharded matrix
    beta1, beta2 = betas
    key, start = rounding or (None, 0)
    first, skipped = divmod(start, OF_A_COUNTER.value)
    _adamw[(-(-(n + skipped) // BLOCK),)](  # triton.cdiv takes the host as long as the rest of this function
        *tensors, *scalars, key, n, first, skipped, beta1, 1 - beta1, beta2, 1 - beta2, eps, decay,
        COPY=copy is not None, STOCHASTIC=rounding is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
