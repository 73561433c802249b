"""fp32 numbers as the integers that their bits are, and rounding by arithmetic that is exact on every GPU:
those before Ada have no instruction for fp8.

    rounding    c - (c - x), with c so large that the difference's last digit is the format's step; ties go
                to even. c is x * 2^n: no need to find the power of two in x
    amax        of magnitudes as integers, in which nan is larger than inf, or by `largest`: tl.max skips nan
"""

from __future__ import annotations

import triton
import triton.language as tl

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)
EXPONENT_AND_SIGN = tl.constexpr(-0x800000)
SECOND = tl.constexpr(-0x10000)  # the high half of a word
# Added to the bits of an fp32 number, it carries into the exponent where the mantissa is above 1.75.
ABOVE_1_75 = tl.constexpr(0x1FFFFF)


@triton.jit
def as_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def first_of(words):
    """The number in the low half of a word of two bf16 numbers, fp32."""
    return as_float(words << 16)


@triton.jit
def second_of(words):
    return as_float(words & SECOND)


@triton.jit
def magnitude_bits(x):
    """|x| as an integer, which orders as the number does, nan last."""
    return as_bits(x) & MAGNITUDE


@triton.jit
def negative(x):
    """-x as a part of the instruction that takes it: Triton's own is 0 - x, and one more."""
    return x * -1.0


@triton.jit
def nearest(magnitude, MANTISSA_BITS: tl.constexpr, SMALLEST_EXPONENT: tl.constexpr):
    """Rounded to so many bits of mantissa, and to the step of 2^SMALLEST_EXPONENT below it."""
    factor: tl.constexpr = 2.0 ** (23 - MANTISSA_BITS)
    # A little more than a power of two: the difference with just that power would have a digit more.
    large = tl.maximum(magnitude, 2.0**SMALLEST_EXPONENT * (1 + 2.0**-18))
    return tl.fma(large, factor, negative(tl.fma(large, factor, negative(magnitude))))


@triton.jit
def nearest_e4m3(magnitude):
    """Saturated; nan stays."""
    return nearest(tl.minimum(magnitude, 448.0, propagate_nan=tl.PropagateNan.ALL), 3, -6)


@triton.jit
def larger(a, b):
    """The larger one, or nan."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(magnitudes, axis: tl.constexpr):
    """The largest along an axis, nan if there is one: tl.max skips nan."""
    return tl.reduce(magnitudes, axis, larger)
