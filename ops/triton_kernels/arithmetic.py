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
def add_toward_zero(x, FACTOR: tl.constexpr, addend):
    """x * FACTOR + addend, fp32."""
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, FACTOR, addend], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def in_threads_of(x, y):
    """x (32 bits), computed by the threads that have y. Else Triton moves what it makes of x to them."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x, y], dtype=x.dtype, is_pure=True, pack=1)


# --- words of two bf16 numbers, the first one in the low half ---


@triton.jit
def bf16_words(first, second):
    """Two fp32 numbers, rounded to bf16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_words(a, b):
    """The larger ones of bf16 magnitudes, or nan."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def mx_words(words, inverse, scale):
    """bf16 numbers * inverse, rounded to E4M3, * scale, in words. Both are powers of two in bf16, and no
    number times inverse is above 448, but inf, which is taken for the largest number and becomes 2^128.

    E4M3's step is an eighth of a number's power of two, from 2^-6 on. Added to 16 of that power, bf16's
    last digit is one step."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 x, power, up, down, smallest, largest, zero, sign;"
        " mov.b32 up, 0x41804180; mov.b32 down, 0xc180c180; mov.b32 smallest, 0x3c803c80;"  # 16, -16, 2^-6
        " mov.b32 largest, 0x7f7f7f7f; mov.b32 zero, 0x80008000;"  # -0 changes nothing in a sum
        " and.b32 x, $1, 0x7fff7fff; min.bf16x2 x, x, largest; fma.rn.bf16x2 x, x, $2, zero;"
        " and.b32 power, x, 0x7f807f80; max.bf16x2 power, power, smallest;"
        " fma.rn.bf16x2 x, power, up, x; fma.rn.bf16x2 x, power, down, x; fma.rn.bf16x2 x, x, $3, zero;"
        " and.b32 sign, $1, 0x80008000; or.b32 $0, x, sign; }",
        "=r,r,r,r", [words, inverse, scale], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def third_byte(words, BYTE: tl.constexpr):
    """Byte 0 to 3 of words (32 bits) as the third of int32 numbers whose other bytes are 0."""
    places = 0x4044 + (BYTE << 8)  # which byte of the two operands each byte of the result is
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, places], dtype=tl.int32, is_pure=True, pack=1
    )
