"""The number formats of blocks: rounding to E2M1 and E8M0, and codes. E4M3 is in ops/quantization/formats.py.

    format   bits  largest  smallest      special numbers
    E2M1     4     6        0.5           none: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
    E8M0     8     2^127    2^-127        nan; powers of two alone: no zero, no sign

Source: "OCP Microscaling Formats (MX)", v1.0, sec. 5.3.3 and 5.4.1. Inputs are bf16 or fp32.
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_RANDOM_BITS = 8  # bits that stochastic rounding takes for an element, as cvt.rs.e2m1x4 does
E8M0_BIAS = 127
E8M0_INF, E8M0_NAN = 254, 255  # E8M0 has no infinity: it saturates
FP32_MANTISSA_BITS = 23


def quotient(numerator: float, x: torch.Tensor) -> torch.Tensor:
    """numerator / x, fp32, rounded once. Of `number / tensor`, torch makes 1 / tensor times the number, which
    rounds twice: a quarter of all scales would be others."""
    return torch.full((), numerator, dtype=torch.float32, device=x.device) / x


def divided(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, fp32, rounded once. Of `tensor / number`, a GPU makes a product with 1 / number."""
    return x / torch.full((), divisor, dtype=torch.float32, device=x.device)


# --- E2M1 ---


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """x, bf16 or fp32, any shape -> the nearest E2M1 numbers, fp32. Ties go to the even code (0.25 -> 0,
    0.75 -> 1); what is above 6 saturates; nan becomes 6, as in PTX's cvt.rn.satfinite.e2m1x2."""
    magnitude = x.float().abs().clamp(max=E2M1_MAX)
    step = _e2m1_step(magnitude)
    return _with_sign((magnitude / step).round() * step, x)


def round_to_e2m1_stochastically(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x, bf16 or fp32, any shape, and bits, integers from 0 to 255 of the same shape -> E2M1 numbers, fp32:
    the neighbor above with a probability that is the distance from the one below in steps. The sum of
    magnitude and bits / 256 of a step is rounded down: the mean is a 512th of a step too small, as with
    cvt.rs.e2m1x4 (PTX) and TransformerEngine's stochastic_round_fp4_e2m1. Saturates at 6; nan becomes 6."""
    if bits.shape != x.shape:
        raise ValueError(f"one number of random bits for each element: x {x.shape}, bits {bits.shape}")
    magnitude = x.float().abs().clamp(max=E2M1_MAX)
    moved = magnitude + bits.float() * (_e2m1_step(magnitude) / 2**E2M1_RANDOM_BITS)
    step = _e2m1_step(moved)
    return _with_sign((moved / step).floor().mul(step).clamp(max=E2M1_MAX), x)


def _e2m1_step(magnitude: torch.Tensor) -> torch.Tensor:
    """The distance from one E2M1 number to the next at this magnitude."""
    return torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))


def _with_sign(magnitude: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    signed = torch.copysign(magnitude, x.float())
    return torch.where(x.isnan(), E2M1_MAX, signed)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """E2M1 numbers, fp32 -> their codes 0 to 15, uint8, same shape. Bit 3 is the sign, also that of zero."""
    magnitude = values.abs()
    large = torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4)
    code = torch.where(magnitude < 2, 2 * magnitude, large)
    return code.to(torch.uint8) + 8 * values.signbit().to(torch.uint8)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15 of any integer type -> their numbers, fp32, same shape."""
    code = (codes & 7).float()
    magnitude = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes < 8, magnitude, -magnitude)


# --- E8M0 ---


def round_up_to_e8m0(x: torch.Tensor) -> torch.Tensor:
    """x, fp32, not negative, any shape -> codes, uint8: code - 127 is the exponent of the smallest power of
    two that is not below x. 0 becomes 2^-127, inf 2^127, nan stays nan (255): PTX's
    cvt.rp.satfinite.ue8m0x2.f32, the "RCEIL" of torchao."""
    bits = x.view(torch.int32)
    exponent = (bits >> FP32_MANTISSA_BITS) & 255
    mantissa = bits & (2**FP32_MANTISSA_BITS - 1)
    # A subnormal number's exponent is 0, although it is below 2^-126: up to 2^-127, code 0 holds it.
    holds = (mantissa == 0) | ((exponent == 0) & (mantissa <= 2 ** (FP32_MANTISSA_BITS - 1)))
    code = (exponent + (~holds).int()).clamp(max=E8M0_INF)
    return torch.where(x.isnan(), E8M0_NAN, code).to(torch.uint8)


def e8m0_values(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 255, uint8 -> the powers of two, fp32; 255 -> nan."""
    powers = power_of_two(codes.int() - E8M0_BIAS)
    return torch.where(codes == E8M0_NAN, torch.nan, powers)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """2 to int32 exponents from -127 to 127, fp32: its bits, since not every exp2 and ldexp is exact."""
    normal = ((exponents + E8M0_BIAS) << FP32_MANTISSA_BITS).view(torch.float32)
    return torch.where(exponents == -E8M0_BIAS, 2.0**-127, normal)
