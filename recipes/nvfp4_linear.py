"""nvfp4: operands in blocks of 16 along the dimension that a product sums over, those of the weight gradient
after a random Hadamard transform, gradients rounded stochastically. recipes/formats/nvfp4.py has the numbers
and their source.

M rows · K columns
"""

from __future__ import annotations

import torch

from ops.custom_op import custom_op, register_fake
from ops.quantization.random_bits import random_bits
from recipes.block_linear import BlockLinear, Emulated, check_operand
from recipes.formats import nvfp4
from recipes.formats.hadamard import random_hadamard

FP4_BLOCK = 16
ROWS, COLUMNS = 0, 1  # the streams of random bits of a gradient's two forms
HADAMARD_ROWS = 256  # of logits, transformed at a time: its fp32 copies are some hundred MiB


class Nvfp4Linear(BlockLinear):
    multiple = 16

    def empty_weight(self, weight):
        both = torch.empty_like(weight, dtype=torch.bfloat16)  # blocks are square
        return Emulated(both, both)

    def quantize_weight(self):
        rounded = self.weight.to(torch.bfloat16)
        both = nvfp4_weight(rounded, rounded.abs().amax().float())
        return Emulated(both, both)

    def quantize(self, x):
        return Emulated(*nvfp4_operand(x, nvfp4_amaxes(x)))

    def quantize_gradient(self, dy):
        return Emulated(*nvfp4_operand(dy, nvfp4_amaxes(dy), self.key))

    def quantize_logits_gradient(self, logits):
        """In bf16: fp4 would round every probability below 2e-6 to 0."""
        columns = torch.empty_like(logits)
        for written, rows in zip(columns.split(HADAMARD_ROWS), logits.split(HADAMARD_ROWS), strict=True):
            written.copy_(random_hadamard(rows, dim=0))
        return Emulated(logits, columns)


@custom_op("nanomfu::emulate_nvfp4_amaxes", mutates_args=())
def nvfp4_amaxes(x: torch.Tensor) -> torch.Tensor:
    """x (M, K), bf16 -> fp32 (2): its amax, and that of its columns after the Hadamard transform.
    ValueError: 16 does not divide M and K."""
    check_operand(x, nvfp4.SQUARE)
    if x.is_cuda:
        from recipes.kernels.nvfp4 import triton_nvfp4_amaxes

        return triton_nvfp4_amaxes(x.contiguous())
    return torch.stack([form.abs().amax().float() for form in (x, random_hadamard(x, dim=0))])


@register_fake(nvfp4_amaxes)
def _(x):
    check_operand(x, nvfp4.SQUARE)
    return x.new_empty(2, dtype=torch.float32)


@custom_op("nanomfu::emulate_nvfp4", mutates_args=())
def nvfp4_operand(
    x: torch.Tensor, amaxes: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K), bf16 -> (M, K) twice: in blocks of 16 along the rows; and along the columns, after the
    Hadamard transform, for a product with another transformed matrix. amaxes: as nvfp4_amaxes(x) gives them,
    fp32 (2). key (random_bits.random_key): stochastic rounding, for gradients.
    ValueError: 16 does not divide M and K."""
    check_operand(x, nvfp4.SQUARE)
    if x.is_cuda:
        from recipes.kernels.nvfp4 import triton_nvfp4

        return triton_nvfp4(x.contiguous(), amaxes, key)
    forms = (
        (x, nvfp4.ALONG_ROWS, ROWS),
        (random_hadamard(x, dim=0), nvfp4.ALONG_COLUMNS, COLUMNS),
    )
    by_rows, by_columns = (
        nvfp4.quantize(form, block, amax, None if key is None else bits_of_operand(x, key, stream))
        for (form, block, stream), amax in zip(forms, amaxes, strict=True)
    )
    return nvfp4.dequantize(by_rows), nvfp4.dequantize(by_columns)


@register_fake(nvfp4_operand)
def _(x, amaxes, key=None):
    check_operand(x, nvfp4.SQUARE)
    return x.new_empty(x.shape), x.new_empty(x.shape)


@custom_op("nanomfu::emulate_nvfp4_weight", mutates_args=())
def nvfp4_weight(weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """weight (N, K), bf16, and its amax, one fp32 number -> (N, K), in blocks of 16 x 16: the same values
    along rows and columns. ValueError: 16 does not divide N and K."""
    check_operand(weight, nvfp4.SQUARE)
    if weight.is_cuda:
        from recipes.kernels.nvfp4 import triton_nvfp4_square

        return triton_nvfp4_square(weight.contiguous(), amax)
    return nvfp4.dequantize(nvfp4.quantize(weight, nvfp4.SQUARE, amax))


@register_fake(nvfp4_weight)
def _(weight, amax):
    check_operand(weight, nvfp4.SQUARE)
    return weight.new_empty(weight.shape)


def bits_of_operand(x: torch.Tensor, key: torch.Tensor, stream: int) -> torch.Tensor:
    """Random bits for x (M, K), int32. A counter has those of 16 elements that a thread of the kernel has
    together: for the form with blocks along columns, 16 rows of a column; for the one with blocks along rows,
    2 rows of 8 columns, in the order of 2 neighbors in the first row, 2 in the second one, the next 2, .."""
    M, K = x.shape
    numbers = random_bits(M * K, key, stream=stream)
    if stream == COLUMNS:
        return numbers.view(M // FP4_BLOCK, K, FP4_BLOCK).transpose(1, 2).reshape(M, K)
    return numbers.view(M // 2, K // 2, 2, 2).transpose(1, 2).reshape(M, K)
