"""fp8 with a scale for each block of 1 x 128 or 128 x 128 numbers, as in DeepSeek-V3.

Activations and gradients have blocks of 128 along the summed dimension, weights blocks of 128 x 128.
Sources: DeepSeek-V3 (arXiv 2412.19437), sec. 3.3.2, for the blocks; TransformerEngine's Float8BlockScaling
for the scales: 448 / amax, rounded down to a power of two unless asked otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.library import custom_op

from ops.quantization.blocks import Block, block_amax, check_block, number_of_blocks, spread
from ops.quantization.formats import E4M3, FP32_MANTISSA_BITS, quotient, to_float8

ALONG_ROWS, ALONG_COLUMNS, SQUARE = (1, 128), (128, 1), (128, 128)


class Blockwise(NamedTuple):
    """A matrix (M, K) in fp8 with one scale a block."""

    values: torch.Tensor  # (M, K), E4M3 or E5M2
    inverse_scales: torch.Tensor  # (M / rows, K / columns), fp32: values * inverse_scales is about the matrix
    block: Block


def quantize(
    x: torch.Tensor, block: Block = ALONG_ROWS, dtype: torch.dtype = E4M3, powers_of_two: bool = True
) -> Blockwise:
    """x (M, K), bf16 or fp32, in blocks of 1 x 128, 128 x 1 or 128 x 128 as numbers of dtype, E4M3 or E5M2. A
    block whose amax is 0, inf or nan has the scale 1: there nan stays nan, and inf saturates. To detect an
    overflow, look at amax.
    ValueError: the block is another one or does not divide the matrix."""
    check_block(block, (ALONG_ROWS, ALONG_COLUMNS, SQUARE), "fp8_blockwise")
    number_of_blocks(x, block)  # raises for x of another size
    values, inverse_scales = _quantize(x, block, dtype, powers_of_two)
    return Blockwise(values, inverse_scales, block)


@custom_op("nanomfu::blockwise_quantize", mutates_args=())
def _quantize(
    x: torch.Tensor, block: Sequence[int], dtype: torch.dtype, powers_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values and the inverse scales. torch.compile does not see into it: on a GPU it divides
    approximately."""
    rows, columns = block
    largest_finite = torch.finfo(x.dtype).max
    scales = scale_of(block_amax(x, (rows, columns)), dtype, powers_of_two, largest_finite)
    return to_float8(x.float() * spread(scales, (rows, columns)), dtype), quotient(1.0, scales)


@_quantize.register_fake
def _(x, block, dtype, powers_of_two):
    scales = x.new_empty(number_of_blocks(x, block), dtype=torch.float32)
    return torch.empty(x.shape, dtype=dtype, device=x.device), scales


def scale_of(
    amax: torch.Tensor,
    dtype: torch.dtype,
    powers_of_two: bool,
    largest: float = torch.finfo(torch.float32).max,
) -> torch.Tensor:
    """What maps amax (fp32, any shape) to the largest number of dtype, or to more than half of it if scales
    are powers of two. 1 where amax is 0, inf or nan; `largest` where the quotient exceeds fp32."""
    scale = quotient(torch.finfo(dtype).max, amax)
    scale = torch.where(scale.isinf(), largest, scale)
    if powers_of_two:
        sign_and_exponent = -(1 << FP32_MANTISSA_BITS)
        scale = (scale.view(torch.int32) & sign_and_exponent).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, scale)


def dequantize(quantized: Blockwise, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """(M, K) in dtype. With powers of two, bf16 holds the values exactly, except those below 2^-126."""
    values, inverse_scales, block = quantized
    return (values.float() * spread(inverse_scales, block)).to(dtype)
