"""AdamW's update of a matrix whose moments have 8 bits, in one pass: dequantize, update, quantize again.

ops/quantization/adamw_8bit.py says how moments are stored. The plain form (ops/quantization/adamw.py) has the
same bits: no product and sum are fused here, and divisions and roots are rounded to the nearest. Bytes of a
parameter, with weights, gradients and the model's copy in bf16, which is the weight itself: 10.1, of which
4.1 are the moments'; 16 in them are 22.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.quantization.adamw import Scalars, plain_adamw
from ops.quantization.adamw_8bit import BLOCK, Moment, maps_on
from ops.triton_kernels.adamw import OF_A_COUNTER, rounded

BLOCKS, WARPS = 4, 4  # of a program


@triton.jit
def _nearest(x, limits):
    """How many of the 255 limits, ascending, are at most x."""
    code = (x * 0).to(tl.int32)
    for shift in tl.static_range(8):  # a binary search
        above = x >= tl.load(limits + code + ((128 >> shift) - 1))
        code += tl.where(above, 128 >> shift, 0)
    return code


@triton.jit
def _load(codes, scales, numbers, at, inside, block, is_block):
    """A moment (BLOCKS, BLOCK) in fp32; 0 outside."""
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + block, mask=is_block, other=0.0)
    return tl.where(inside, tl.load(numbers + code) * scale[:, None], 0.0)


@triton.jit
def _store(x, codes, scales, limits, at, inside, block, is_block):
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12)
    code = _nearest(tl.div_rn(x, scale[:, None]), limits)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)
    tl.store(scales + block, scale, mask=is_block)


@triton.jit(do_not_specialize_on_alignment=[*Scalars._fields, "key"], do_not_specialize=["first"])
def _adamw_8bit(
    weight, gradient, mean, mean_scales, square, square_scales, copy,
    signed, signed_limits, unsigned, unsigned_limits,
    rate, grad_scale, found_inf, step, correction1, root2, key, blocks, columns, blocks_of_row, first,
    rest1, rest2, eps, decay,
    COPY: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """first: the counter of the shard's first element, for random bits."""
    if tl.load(found_inf) == 0:
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        is_block = block < blocks
        begin = block % blocks_of_row * BLOCK
        start = block // blocks_of_row * columns + begin  # of each block, in this shard
        element = tl.arange(0, BLOCK)[None, :]
        inside = is_block[:, None] & (begin[:, None] + element < columns)
        at = start[:, None] + element
        step_size = tl.load(rate)
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.div_rn(g, tl.load(grad_scale))
        m = _load(mean, mean_scales, signed, at, inside, block, is_block)
        v = _load(square, square_scales, unsigned, at, inside, block, is_block)
        m += rest1 * (g - m)
        v += rest2 * (g * g - v)
        w -= step_size * decay * w
        root = tl.div_rn(tl.sqrt_rn(v), tl.load(root2))
        w -= tl.div_rn(tl.div_rn(step_size, tl.load(correction1)) * m, root + eps)
        per_block: tl.constexpr = BLOCK // OF_A_COUNTER
        counter = first + start[:, None] // OF_A_COUNTER + tl.arange(0, per_block)[None, :]
        counter = tl.reshape(counter, (BLOCKS * per_block,)).to(tl.uint32)
        flat = tl.reshape(w, (BLOCKS * BLOCK,))
        flat = rounded(flat, weight.dtype.element_ty, key, step, 0, counter, STOCHASTIC)
        stored = tl.reshape(flat, (BLOCKS, BLOCK))
        tl.store(weight + at, stored, mask=inside)
        _store(m, mean, mean_scales, signed_limits, at, inside, block, is_block)
        _store(v, square, square_scales, unsigned_limits, at, inside, block, is_block)
        if COPY:  # as rounded: a copy made after loading would see nothing else
            tl.store(copy + at, stored.to(copy.dtype.element_ty), mask=inside)


def triton_adamw_8bit(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: Moment,
    square: Moment,
    copy: torch.Tensor | None,
    scalars: Scalars,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    rounding: tuple[torch.Tensor, int] | None = None,
) -> None:
    """plain_adamw() in one kernel. Its random bits begin at multiples of 8 elements, so rows of another
    width that are rounded stochastically take the plain form."""
    rows, columns = weight.shape
    if rounding is not None and columns % OF_A_COUNTER.value:
        plain_adamw(weight, gradient, mean, square, copy, scalars, betas, eps, decay, rounding)
        return
    tensors = [weight, gradient, *mean, *square, weight if copy is None else copy]
    assert all(t.is_contiguous() for t in tensors), [(t.shape, t.stride()) for t in tensors]
    if not rows:
        return  # this rank may have no row of a sharded matrix
    key, start = rounding or (None, 0)
    blocks_of_row = -(-columns // BLOCK)
    blocks = rows * blocks_of_row
    _adamw_8bit[(-(-blocks // BLOCKS),)](
        *tensors, *maps_on(weight.device), *scalars, key, blocks, columns, blocks_of_row,
        start // OF_A_COUNTER.value, 1 - betas[0], 1 - betas[1], eps, decay,
        COPY=copy is not None, STOCHASTIC=rounding is not None, BLOCKS=BLOCKS, BLOCK=BLOCK, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
