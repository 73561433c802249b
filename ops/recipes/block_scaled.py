"""mxfp8 and nvfp4 on tensor cores that multiply blocks with scales: Blackwell's, compute capability 10.x.

The codes and scales are those of the emulation (mxfp8.py, nvfp4.py): the same rounding, transform and random
bits. What differs is how they are kept. torch's matmul wants the summed dimension contiguous in both factors
and the scales in an order of its own, so a form of an operand is

    codes    uint8 in rows along the summed dimension: mxfp8 one E4M3 byte for a number, as that dtype; nvfp4
             two E2M1 codes a byte, the first one in the low half. `columns` is transposed
    scales   uint8, flat: those of the blocks in tiles (ops/quantization/scale_layout.py); at the end of
             nvfp4's, the 4 bytes of its global factor A / 2688, fp32

A product with nvfp4's global factors is not rounded to bf16 here, as it is in the emulation (emulated.py).
Nothing runs on these kernels before block_scaled_check.py has compared them with the emulation.

M, N rows · K columns
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.library import custom_op

from ops.cross_entropy import cross_entropy
from ops.quantization import mxfp8, nvfp4
from ops.quantization.blocks import Block
from ops.quantization.formats import E4M3, divided
from ops.quantization.hadamard import random_hadamard
from ops.quantization.scale_layout import from_tiles, tiles_size, to_tiles
from ops.quantized_linear import Kept, QuantizedLinear
from ops.recipes.emulated import check_operand
from ops.recipes.nvfp4 import COLUMNS, ROWS, bits_of_operand, nvfp4_amaxes
from ops.recipes.properties import ALIGNMENTS

FACTOR_BYTES = 4  # of nvfp4's scales, the last ones
MXFP8_BLOCKS, NVFP4_BLOCKS = (mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS), (nvfp4.SQUARE,)

Forms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # the fields of a BlockOperand


class BlockOperand(NamedTuple):
    """A matrix (M, K) for two matmuls: codes in rows (M, K) and in columns (K, M), and the scales of both."""

    rows: torch.Tensor
    columns: torch.Tensor
    scales: torch.Tensor
    column_scales: torch.Tensor


class BlockScaledLinear(QuantizedLinear):
    """All three products are of two forms whose rows it sums over."""

    @staticmethod
    def product(x, weight, dtype):
        return block_scaled_product(x.rows, x.scales, weight.rows, weight.scales, dtype)

    @staticmethod
    def kept(x, weight):
        return Kept(x.columns, x.column_scales, weight.columns, weight.column_scales)

    @staticmethod
    def input_gradient(dy, kept, dtype):
        return block_scaled_product(dy.rows, dy.scales, kept.weight_columns, kept.weight_scale, dtype)

    @staticmethod
    def weight_gradient(dy, kept, dtype, total):
        operands = dy.columns, dy.column_scales, kept.x_columns, kept.x_scale
        if total is None:
            return block_scaled_product(*operands, dtype)
        return add_block_scaled_product(*operands, total)

    @staticmethod
    def write(forms: Forms, into: BlockOperand) -> None:
        for written, form in zip(into, forms, strict=True):
            written.copy_(form)


class NativeMxfp8Linear(BlockScaledLinear):
    multiple = ALIGNMENTS["mxfp8"]

    @staticmethod
    def quantize_input(x, amax, low):
        return BlockOperand(*mxfp8_forms(x))

    @staticmethod
    def quantize_gradient(dy, amax, low):
        return BlockOperand(*mxfp8_forms(dy))

    @staticmethod
    def loss_and_gradient(logits, targets, low):
        losses = cross_entropy(logits, targets, True)  # by now, logits are their gradient
        return losses, BlockOperand(*mxfp8_forms(logits))

    @staticmethod
    def empty_weight(weight):
        return BlockOperand(*_empty_mxfp8(weight))

    @staticmethod
    def requantize(weights, into):
        for weight, low in zip(weights, into, strict=True):
            BlockScaledLinear.write(mxfp8_forms(weight.to(torch.bfloat16)), low.weight)


class NativeNvfp4Linear(BlockScaledLinear):
    """Its state is the key of its random bits, int64 (4). Not for the head, the gradient of whose logits is
    bf16: it stays emulated."""

    multiple = 32  # torch wants 16 bytes of codes

    @staticmethod
    def quantize_input(x, amax, low):
        return BlockOperand(*nvfp4_forms(x, nvfp4_amaxes(x)))

    @staticmethod
    def quantize_gradient(dy, amax, low):
        return BlockOperand(*nvfp4_forms(dy, nvfp4_amaxes(dy), low.state))

    @staticmethod
    def loss_and_gradient(logits, targets, low):
        raise AssertionError("nvfp4's head is emulated")

    @staticmethod
    def empty_weight(weight):
        return BlockOperand(*_empty_nvfp4(weight))

    @staticmethod
    def requantize(weights, into):
        for weight, low in zip(weights, into, strict=True):
            rounded = weight.to(torch.bfloat16)
            forms = nvfp4_weight_forms(rounded, rounded.abs().amax().float())
            BlockScaledLinear.write(forms, low.weight)


# --- products ---


@custom_op("nanomfu::block_scaled_product", mutates_args=())
def block_scaled_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Forms of a (M, K) and of b (N, K) -> a b^T (M, N) in dtype. RuntimeError: torch has no such matmul."""
    return scaled_mm(a, a_scales, b, b_scales, dtype)


@block_scaled_product.register_fake
def _(a, a_scales, b, b_scales, dtype):
    return a.new_empty(len(a), len(b), dtype=dtype)


@custom_op("nanomfu::add_block_scaled_product", mutates_args=("total",))
def add_block_scaled_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, total: torch.Tensor
) -> None:
    """total (M, N), fp32, += a b^T."""
    total.add_(scaled_mm(a, a_scales, b, b_scales, total.dtype))


@add_block_scaled_product.register_fake
def _(a, a_scales, b, b_scales, total):
    return None


def entry_point() -> str:
    """What multiplies blocks in the torch that is installed, by its name. RuntimeError: nothing does."""
    if hasattr(F, "scaled_mm"):  # since 2.10
        return "torch.nn.functional.scaled_mm"
    if hasattr(torch, "_scaled_mm"):
        return "torch._scaled_mm"
    raise RuntimeError(f"torch {torch.__version__} has no block-scaled matmul; 2.11 to 2.13 have one")


def scaled_mm(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """block_scaled_product by torch's own matmul. Tests replace this function."""
    (a, *a_scale), (b, *b_scale) = _typed(a, a_scales), _typed(b, b_scales)
    if entry_point() == "torch._scaled_mm":
        product = torch._scaled_mm(a, b.t(), a_scale[0], b_scale[0], out_dtype=dtype)
        return product if len(a_scale) == 1 else product.mul_(a_scale[1] * b_scale[1])
    kinds, swizzles = F.ScalingType, F.SwizzleType
    recipe = [kinds.BlockWise1x32] if len(a_scale) == 1 else [kinds.BlockWise1x16, kinds.TensorWise]
    swizzle = [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE][: len(recipe)]
    return F.scaled_mm(a, b.t(), a_scale, recipe, b_scale, recipe, swizzle, swizzle, output_dtype=dtype)


def _typed(codes: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
    """Codes, scales of blocks, and nvfp4's global factor, in the dtypes that torch's matmul tells them by."""
    if codes.dtype == E4M3:
        return [codes, scales.view(torch.float8_e8m0fnu)]
    blocks, factor = scales.split([len(scales) - FACTOR_BYTES, FACTOR_BYTES])
    return [codes.view(torch.float4_e2m1fn_x2), blocks.view(E4M3), factor.view(torch.float32).view(())]


def numbers_and_factor(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A form's numbers, which bf16 holds exactly, in rows along the summed dimension; and what they are to be
    multiplied by, () fp32."""
    rows, width = codes.shape
    if codes.dtype == E4M3:
        exponents = from_tiles(scales, rows, width // 32)
        numbers = mxfp8.dequantize(mxfp8.Mxfp8(codes, exponents, mxfp8.ALONG_ROWS))
        return numbers, torch.ones((), device=codes.device)
    _, blocks, factor = _typed(codes, scales)
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    of_blocks = from_tiles(blocks.view(torch.uint8), rows, width // 8).view(E4M3)
    return nvfp4.dequantize_blocks(nvfp4.Nvfp4(both, of_blocks, factor, nvfp4.ALONG_ROWS)), factor


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A form's numbers, bf16, as the emulation has them."""
    numbers, factor = numbers_and_factor(codes, scales)
    return (numbers.float() * factor).to(torch.bfloat16)


# --- casts ---


@custom_op("nanomfu::mxfp8_forms", mutates_args=())
def mxfp8_forms(x: torch.Tensor) -> Forms:
    """x (M, K), bf16 -> both of its forms. ValueError: 32 does not divide M and K."""
    check_operand(x, *MXFP8_BLOCKS)
    if x.is_cuda:
        from ops.triton_kernels.block_scaled import triton_mxfp8_forms

        return triton_mxfp8_forms(x.contiguous(), _empty_mxfp8(x))
    (rows, exponents, _), (columns, column_exponents, _) = (
        mxfp8.quantize(form) for form in (x, x.t().contiguous())
    )
    return rows, columns, to_tiles(exponents), to_tiles(column_exponents)


@mxfp8_forms.register_fake
def _(x):
    check_operand(x, *MXFP8_BLOCKS)
    return _empty_mxfp8(x)


def _empty_mxfp8(x: torch.Tensor) -> Forms:
    M, K = x.shape
    codes = [x.new_empty(shape, dtype=E4M3) for shape in ((M, K), (K, M))]
    sizes = [tiles_size(rows, width // 32) for rows, width in ((M, K), (K, M))]
    scales = [x.new_empty(size, dtype=torch.uint8) for size in sizes]
    return codes[0], codes[1], scales[0], scales[1]


@custom_op("nanomfu::nvfp4_forms", mutates_args=())
def nvfp4_forms(x: torch.Tensor, amaxes: torch.Tensor, key: torch.Tensor | None = None) -> Forms:
    """x (M, K), bf16 -> both of its forms, columns after the Hadamard transform.
    amaxes, key: as for nvfp4_operand(). ValueError: 16 does not divide M and K."""
    check_operand(x, *NVFP4_BLOCKS)
    if x.is_cuda:
        from ops.triton_kernels.block_scaled import triton_nvfp4_forms

        return triton_nvfp4_forms(x.contiguous(), amaxes, key, _empty_nvfp4(x))
    bits = [None if key is None else bits_of_operand(x, key, stream) for stream in (ROWS, COLUMNS)]
    rows = nvfp4.quantize(x, nvfp4.ALONG_ROWS, amaxes[0], bits[0])
    columns = nvfp4.quantize(random_hadamard(x, dim=0), nvfp4.ALONG_COLUMNS, amaxes[1], bits[1])
    return _packed(rows, columns)


@nvfp4_forms.register_fake
def _(x, amaxes, key=None):
    check_operand(x, *NVFP4_BLOCKS)
    return _empty_nvfp4(x)


@custom_op("nanomfu::nvfp4_weight_forms", mutates_args=())
def nvfp4_weight_forms(weight: torch.Tensor, amax: torch.Tensor) -> Forms:
    """weight (N, K), bf16, and its amax, one fp32 number -> both of its forms: the same numbers, in
    blocks of 16 x 16. ValueError: 16 does not divide N and K."""
    check_operand(weight, *NVFP4_BLOCKS)
    if weight.is_cuda:
        from ops.triton_kernels.block_scaled import triton_nvfp4_weight_forms

        return triton_nvfp4_weight_forms(weight.contiguous(), amax, _empty_nvfp4(weight))
    square = nvfp4.quantize(weight, nvfp4.SQUARE, amax)
    return _packed(square, square)


@nvfp4_weight_forms.register_fake
def _(weight, amax):
    check_operand(weight, *NVFP4_BLOCKS)
    return _empty_nvfp4(weight)


def _empty_nvfp4(x: torch.Tensor) -> Forms:
    M, K = x.shape
    codes = [x.new_empty(shape, dtype=torch.uint8) for shape in ((M, K // 2), (K, M // 2))]
    sizes = [tiles_size(rows, width // 16) + FACTOR_BYTES for rows, width in ((M, K), (K, M))]
    scales = [x.new_empty(size, dtype=torch.uint8) for size in sizes]
    return codes[0], codes[1], scales[0], scales[1]


def _packed(rows: nvfp4.Nvfp4, columns: nvfp4.Nvfp4) -> Forms:
    transposed = columns._replace(
        codes=columns.codes.t(), scales=columns.scales.t(), block=columns.block[::-1]
    )
    (codes, scales), (column_codes, column_scales) = _packed_form(rows), _packed_form(transposed)
    return codes, column_codes, scales, column_scales


def _packed_form(form: nvfp4.Nvfp4) -> tuple[torch.Tensor, torch.Tensor]:
    high: Block = form.block
    scales = form.scales.view(torch.uint8).repeat_interleave(high[0], 0)  # each row has its own
    factor = divided(form.amax, nvfp4.LARGEST).view(1).view(torch.uint8)
    codes = form.codes[:, ::2] | (form.codes[:, 1::2] << 4)
    return codes.contiguous(), torch.cat((to_tiles(scales), factor))
