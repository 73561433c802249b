"""The Triton kernel of emulated fp8 with one scale: a bf16 matrix whose numbers are those of E4M3 or E5M2.

It gives the bits of ops/emulation.py's plain form, on GPUs without fp8, too: rounding is by exact arithmetic
(float_bits.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.float_bits import MAGNITUDE, as_bits, as_float, nearest, with_sign_of

BLOCK = 2048  # numbers of a program


@triton.jit
def _emulate_float8(x, scale, inverse, out, count, E4M3: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    scaled = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    magnitude = as_float(as_bits(scaled) & MAGNITUDE)
    largest: tl.constexpr = 448.0 if E4M3 else 57344.0
    magnitude = tl.minimum(magnitude, largest, propagate_nan=tl.PropagateNan.ALL)
    rounded = nearest(magnitude, 3, -6) if E4M3 else nearest(magnitude, 2, -14)
    y = with_sign_of(rounded, scaled) * tl.load(inverse)
    tl.store(out + at, y.to(tl.bfloat16), mask=inside)


def triton_emulate_float8(
    x: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x (M, N), bf16, contiguous; scale and its reciprocal () fp32 -> (M, N), bf16."""
    out, count = torch.empty_like(x), x.numel()
    _emulate_float8[(triton.cdiv(count, BLOCK),)](
        x, scale, inverse, out, count, E4M3=dtype == torch.float8_e4m3fn, BLOCK=BLOCK
    )
    return out
