"""low_precision='mxfp8': E4M3 numbers in blocks of 32, along the dimension that a product sums over.
formats/mxfp8.py has the numbers and their source.

M rows · K columns
"""

from __future__ import annotations

import torch

from ops.custom_op import custom_op, register_fake
from recipes.block_linear import BlockLinear, Emulated, check_operand
from recipes.block_recipe import BlockRecipe
from recipes.block_scaled import NativeMxfp8Linear
from recipes.formats import mxfp8


class Mxfp8Linear(BlockLinear):
    multiple = 32

    def empty_weight(self, weight):
        return Emulated(*(torch.empty_like(weight, dtype=torch.bfloat16) for _ in range(2)))

    def quantize_weight(self):
        return self.quantize(self.weight.to(torch.bfloat16))

    def quantize(self, x):
        return Emulated(*mxfp8_operand(x))


@custom_op("nanomfu::emulate_mxfp8", mutates_args=())
def mxfp8_operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), bf16 -> (M, K) twice: in blocks of 32 along the rows, and along the columns.
    ValueError: 32 does not divide M and K."""
    check_operand(x, mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS)
    if x.is_cuda:
        from recipes.kernels.mxfp8 import triton_mxfp8

        return triton_mxfp8(x.contiguous())
    by_rows, by_columns = (mxfp8.quantize(x, block) for block in (mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS))
    return mxfp8.dequantize(by_rows), mxfp8.dequantize(by_columns)


@register_fake(mxfp8_operand)
def _(x):
    check_operand(x, mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS)
    return x.new_empty(x.shape), x.new_empty(x.shape)


class Mxfp8(BlockRecipe):
    multiple = 32
    peak = "fp8"
    emulated, scaled, scales_head = Mxfp8Linear, NativeMxfp8Linear, True
    bytes_scaled, weight_bytes = 1 + 1 / 32, 4.0

    @staticmethod
    def casts(x, key):
        return {"cast": mxfp8_operand(x)}


RECIPE = Mxfp8
