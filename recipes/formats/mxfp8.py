"""MXFP8: E4M3 numbers in blocks of 32, each with a power of two as its scale.

Blocks lie along the dimension that the matmul sums. A matrix that two matmuls sum along different dimensions
is quantized twice, from its bf16 form.

Sources: "OCP Microscaling Formats (MX)", v1.0, for the format; Mishra et al. 2025 (arXiv 2506.08027) for
scales that are rounded up, so that no number saturates; TransformerEngine's MXFP8BlockScaling and torchao's
RCEIL for the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ops.custom_op import custom_op, register_fake
from ops.quantization.formats import to_float8
from recipes.formats.blocks import Block, block_amax, number_of_blocks, spread
from recipes.formats.numbers import (
    E4M3,
    E4M3_MAX,
    E8M0_BIAS,
    E8M0_NAN,
    e8m0_values,
    power_of_two,
    round_up_to_e8m0,
)

ALONG_ROWS, ALONG_COLUMNS = (1, 32), (32, 1)  # a matmul sums along K or along M


class Mxfp8(NamedTuple):
    """A matrix (M, K) in MXFP8."""

    values: torch.Tensor  # (M, K), E4M3
    exponents: torch.Tensor  # (M / rows, K / columns), uint8: E8M0 codes
    block: Block


def quantize(x: torch.Tensor, block: Block = ALONG_ROWS) -> Mxfp8:
    """x (M, K), bf16 or fp32, in blocks of 1 x 32 or 32 x 1. A block with nan becomes nan; in one with inf,
    inf is 448 with the largest scale, which dequantize() makes inf again. A block below 2^-118 becomes 0,
    because TransformerEngine and torchao do not scale where the exponent's code is 0.
    ValueError: the block does not divide the matrix."""
    number_of_blocks(x, block)  # raises for x of another size
    values, exponents = _quantize(x, block)
    return Mxfp8(values, exponents, block)


@custom_op("nanomfu::mxfp8_quantize", mutates_args=())
def _quantize(x: torch.Tensor, block: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the exponents. torch.compile does not see into it: it may keep more digits than bf16
    has of the x that it makes."""
    rows, columns = block
    exponents = round_up_to_e8m0(block_amax(x, (rows, columns)) * (1 / E4M3_MAX))  # the rounded 1/448
    inverse = torch.where(exponents == 0, 1.0, power_of_two(E8M0_BIAS - exponents.clamp(max=254).int()))
    inverse = torch.where(exponents == E8M0_NAN, torch.nan, inverse)
    return to_float8(x.float() * spread(inverse, (rows, columns)), E4M3), exponents


@register_fake(_quantize)
def _(x, block):
    exponents = x.new_empty(number_of_blocks(x, block), dtype=torch.uint8)
    return torch.empty(x.shape, dtype=E4M3, device=x.device), exponents


def dequantize(quantized: Mxfp8, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(M, K) in dtype. bf16 holds the values exactly, except those below its normal
    numbers (2^-126); one that E4M3 rounds up to 2^128 becomes inf."""
    values, exponents, block = quantized
    return (values.float() * spread(e8m0_values(exponents), block)).to(dtype)
