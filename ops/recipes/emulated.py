"""Operands of matmuls whose numbers are those of MXFP8 or NVFP4, held in bf16.

bf16 holds every MXFP8 number, and every NVFP4 number but for its global factor. So an ordinary bf16 matmul of
such operands is what Blackwell's tensor cores compute, up to the order of sums, on any GPU and on a CPU. It
is no faster than bf16. The product with NVFP4's global factor is rounded to bf16, which changes the result of
a matmul by 0.24 %; the format itself changes it by 14.5 % (tests/unit/test_quantization_nvfp4.py has both
without that rounding).

torch.compile does not see into the casts: it would divide approximately and keep more digits than bf16 has.
On a GPU each is one kernel (ops/triton_kernels/mxfp8.py, nvfp4.py), with the same bits.

M rows · K columns
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ops.linear import weight_gradient
from ops.quantization.blocks import Block, number_of_blocks
from ops.quantized_linear import QuantizedLinear


class EmulatedLinear(QuantizedLinear):
    """Multiplies in bf16."""

    @staticmethod
    def product(x, weight, dtype):
        return F.linear(x.rows, weight.rows)

    @staticmethod
    def input_gradient(dy, kept, dtype):
        return dy.rows @ kept.weight_columns

    @staticmethod
    def weight_gradient(dy, kept, dtype, total):
        return weight_gradient(dy.columns, kept.x_columns, total)


def check_operand(x: torch.Tensor, *blocks: Block) -> None:
    """ValueError: x is not bf16, or a block does not divide it."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"emulated operands are bf16, not {x.dtype}; cast the matrix first")
    for block in blocks:
        number_of_blocks(x, block)
