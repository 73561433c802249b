"""More of what ops/triton_kernels/arithmetic.py has: a GPU's own instructions, for casts to blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_toward_zero(x, FACTOR: tl.constexpr, addend):
    """x * FACTOR + addend, fp32."""
    return tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, FACTOR, addend], dtype=tl.float32, is_pure=True, pack=1
    )


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
