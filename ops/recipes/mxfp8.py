"""mxfp8: operands in blocks of 32 along the dimension that a product sums over. ops/quantization/mxfp8.py
has the numbers and their source.

M rows · K columns
"""

from __future__ import annotations

import torch

from ops.cross_entropy import cross_entropy
from ops.custom_op import custom_op, register_fake
from ops.quantization import mxfp8
from ops.quantized_linear import Operand
from ops.recipes.emulated import EmulatedLinear, check_operand
from ops.recipes.properties import ALIGNMENTS


class Mxfp8Linear(EmulatedLinear):
    multiple = ALIGNMENTS["mxfp8"]

    @staticmethod
    def quantize_input(x, amax, low):
        return Operand(*mxfp8_operand(x))

    @staticmethod
    def quantize_gradient(dy, amax, low):
        return Operand(*mxfp8_operand(dy))

    @staticmethod
    def loss_and_gradient(logits, targets, low):
        losses = cross_entropy(logits, targets, True)  # by now, logits are their gradient
        return losses, Operand(*mxfp8_operand(logits))

    @staticmethod
    def empty_weight(weight):
        return Operand(*(torch.empty_like(weight, dtype=torch.bfloat16) for _ in range(2)))

    @staticmethod
    def requantize(weights, into):
        for weight, low in zip(weights, into, strict=True):
            rows, columns = mxfp8_operand(weight.to(torch.bfloat16))
            low.weight.rows.copy_(rows)
            low.weight.columns.copy_(columns)


@custom_op("nanomfu::emulate_mxfp8", mutates_args=())
def mxfp8_operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), bf16 -> (M, K) twice: in blocks of 32 along the rows, and along the columns.
    ValueError: 32 does not divide M and K."""
    check_operand(x, mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS)
    if x.is_cuda:
        from ops.triton_kernels.mxfp8 import triton_mxfp8

        return triton_mxfp8(x.contiguous())
    by_rows, by_columns = (mxfp8.quantize(x, block) for block in (mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS))
    return mxfp8.dequantize(by_rows), mxfp8.dequantize(by_columns)


@register_fake(mxfp8_operand)
def _(x):
    check_operand(x, mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS)
    return x.new_empty(x.shape), x.new_empty(x.shape)
