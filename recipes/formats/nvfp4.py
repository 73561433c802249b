"""NVFP4: E2M1 numbers, an E4M3 scale for each block of them, and one fp32 scale for the whole matrix.

    A       largest magnitude of the matrix, fp32
    g       2688 / A, since 448 x 6 = 2688: the largest block's scale becomes E4M3's largest number
    scale   of a block: its amax x g / 6, in E4M3
    value   code x scale x A / 2688

Source: "Pretraining Large Language Models with NVFP4" (NVIDIA 2025, arXiv 2509.25149), sec. 4;
TransformerEngine's reference_nvfp4.py for the bits. Activations and gradients have blocks of 16 along the
summed dimension, weights blocks of 16 x 16, so that a weight has the same values in forward and backward.
Gradients are rounded stochastically. Both operands of a weight's gradient go through
recipes/formats/hadamard.py before. The three divisions must be correctly rounded: a kernel that divides
approximately has other codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ops.custom_op import custom_op, register_fake
from ops.quantization.formats import to_float8
from recipes.formats.blocks import Block, block_amax, number_of_blocks, spread
from recipes.formats.numbers import (
    E2M1_MAX,
    E4M3,
    E4M3_MAX,
    divided,
    e2m1_codes,
    e2m1_values,
    quotient,
    round_to_e2m1,
    round_to_e2m1_stochastically,
)

ALONG_ROWS, ALONG_COLUMNS, SQUARE = (1, 16), (16, 1), (16, 16)
LARGEST = E2M1_MAX * E4M3_MAX  # what A is mapped to
FP32_MAX = torch.finfo(torch.float32).max


class Nvfp4(NamedTuple):
    """A matrix (M, K) in NVFP4."""

    codes: torch.Tensor  # (M, K), uint8: an E2M1 code each
    scales: torch.Tensor  # (M / rows, K / columns), E4M3
    amax: torch.Tensor  # () fp32
    block: Block


def quantize(
    x: torch.Tensor,
    block: Block = ALONG_ROWS,
    amax: torch.Tensor | None = None,
    bits: torch.Tensor | None = None,
) -> Nvfp4:
    """x (M, K), bf16 or fp32, in blocks of 1 x 16, 16 x 1 or 16 x 16. amax: of all of x, one number of any
    shape; None: it is computed. bits (M, K), integers from 0 to 255: stochastic rounding; None: to nearest
    even. With nan in x, every scale is nan. With inf, the global scale is 1, and what is above a block's
    range saturates; amax stays inf, so that global_factor() does.
    ValueError: the block does not divide the matrix."""
    number_of_blocks(x, block)  # raises for x of another size
    amax = (x.abs().amax() if amax is None else amax).float().reshape(())
    codes, scales = _quantize(x, block, amax, bits)
    return Nvfp4(codes, scales, amax, block)


@custom_op("nanomfu::nvfp4_quantize", mutates_args=())
def _quantize(
    x: torch.Tensor, block: Sequence[int], amax: torch.Tensor, bits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scales. torch.compile does not see into it: on a GPU it divides approximately."""
    rows, columns = block
    encode = global_encode_scale(amax)
    scales = to_float8(block_amax(x, (rows, columns)) * (encode * (1 / E2M1_MAX)), E4M3)
    block_encode = quotient(1.0, scales.float() * quotient(1.0, encode)).clamp(max=FP32_MAX)
    scaled = (x.float() * spread(block_encode, (rows, columns))).clamp(-E2M1_MAX, E2M1_MAX)
    rounded = round_to_e2m1(scaled) if bits is None else round_to_e2m1_stochastically(scaled, bits)
    return e2m1_codes(rounded), scales


@register_fake(_quantize)
def _(x, block, amax, bits):
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return codes, x.new_empty(number_of_blocks(x, block), dtype=E4M3)


def global_encode_scale(amax: torch.Tensor) -> torch.Tensor:
    """What maps amax (fp32) to 2688; 1 if amax is 0 or inf, and finite however small amax is."""
    scale = quotient(LARGEST, amax).clamp(max=FP32_MAX)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def global_factor(quantized: Nvfp4) -> torch.Tensor:
    """A / 2688, fp32 (): what the values of dequantize_blocks() are to be multiplied by."""
    return divided(quantized.amax, LARGEST)


def dequantize_blocks(quantized: Nvfp4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """code x scale (M, K) in dtype, without the global factor. bf16 holds it exactly: 2 bits times 4 bits."""
    codes, scales, _, block = quantized
    return (e2m1_values(codes) * spread(scales.float(), block)).to(dtype)


def dequantize(quantized: Nvfp4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The matrix (M, K) in dtype; the product with the global factor is rounded to it."""
    return (dequantize_blocks(quantized, torch.float32) * global_factor(quantized)).to(dtype)
