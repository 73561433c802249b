"""What Triton's kernels compute with the GPU's own instructions, where Triton's functions take several.

At its power limit an H200 has about four instructions a byte of memory traffic, so a memory-bound kernel that
takes more is bound by them. tl.exp handles results below 2^-126 with four more instructions, a division takes
eight. exp2 and sigmoid are as accurate as those (2 units in the last place), but for results below 2^-126,
which are 0. The others round once, as documented.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp2(x):
    """2^x, fp32."""
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), fp32."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1 + exp2(x * -LOG2_E)], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x (fp32), rounded to dtype: fp32 still."""
    if dtype == tl.bfloat16:  # two at a time
        return tl.inline_asm_elementwise(
            "{ .reg .b32 two; cvt.rn.bf16x2.f32 two, $3, $2; shl.b32 $0, two, 16;"
            " and.b32 $1, two, 0xffff0000; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(dtype).to(tl.float32)


@triton.jit
def in_threads_of(x, y):
    """x (32 bits), computed by the threads that have y. Else Triton moves what it makes of x to them."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=1)
