"""mxfp8 and nvfp4 on tensor cores that multiply blocks with scales: Blackwell's, compute capability 10.x.

The codes and scales are those of the emulation (mxfp8.py, nvfp4_linear.py): the same rounding,
transform and random bits. torch's matmul wants the summed dimension contiguous in both factors and the scales
in an order of its own, so that a form of an operand is

    codes    rows along the summed dimension, `columns` is transposed: mxfp8 in E4M3; nvfp4 as uint8, two E2M1
             codes a byte, the first one in the low half
    scales   uint8, flat: those of the blocks in tiles (recipes/formats/scale_layout.py); nvfp4's end with
             the 4 bytes of its global factor A / 2688, fp32

nvfp4's global factors multiply a product here, and are not rounded into the operands (block_linear.py).
Nothing computes so before block_scaled_check.py has compared it with the emulation.

M, N rows · K columns
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ops.custom_op import custom_op, register_fake
from recipes.block_linear import BlockLinear, check_operand
from recipes.formats import mxfp8, nvfp4
from recipes.formats.hadamard import random_hadamard
from recipes.formats.numbers import E4M3
from recipes.formats.scale_layout import from_tiles, tiles, to_tiles
from recipes.nvfp4_linear import COLUMNS, ROWS, bits_of_operand, nvfp4_amaxes

FACTOR_BYTES = 4  # the last ones of nvfp4's scales

Forms = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class BlockOperand(NamedTuple):
    """A matrix (M, K) for two matmuls: codes in rows (M, K) and in columns (K, M), and the scales of both."""

    rows: torch.Tensor
    columns: torch.Tensor
    scales: torch.Tensor
    column_scales: torch.Tensor


class BlockScaledLinear(BlockLinear):
    multiple = 32  # of fp4, too: torch wants 16 bytes of codes
    fp4: bool

    def empty_weight(self, weight):
        return BlockOperand(*_empty(weight, self.fp4))

    def kept(self, x):
        return x.columns, x.column_scales, self.quantized.columns, self.quantized.column_scales

    def product(self, x, dtype):
        return block_scaled_product(x.rows, x.scales, self.quantized.rows, self.quantized.scales, dtype)

    def input_gradient(self, dy, kept, dtype):
        return block_scaled_product(dy.rows, dy.scales, *kept[2:], dtype)

    def weight_gradient(self, dy, kept, dtype, total):
        operands = dy.columns, dy.column_scales, *kept[:2]
        if total is None:
            return block_scaled_product(*operands, dtype)
        total.add_(block_scaled_product(*operands, total.dtype))
        return None


class NativeMxfp8Linear(BlockScaledLinear):
    fp4 = False

    def quantize(self, x):
        return BlockOperand(*block_forms(x))

    def quantize_weight(self):
        return self.quantize(self.weight.to(torch.bfloat16))


class NativeNvfp4Linear(BlockScaledLinear):
    """A head, the gradient of whose logits is in bf16, stays emulated."""

    fp4 = True

    def quantize(self, x, key=None):
        return BlockOperand(*block_forms(x, nvfp4_amaxes(x), key))

    def quantize_gradient(self, dy):
        return self.quantize(dy, self.key)

    def quantize_weight(self):
        rounded = self.weight.to(torch.bfloat16)
        return BlockOperand(*block_forms(rounded, rounded.abs().amax().float().view(1)))


# --- products ---


@custom_op("nanomfu::block_scaled_product", mutates_args=())
def block_scaled_product(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Forms of a (M, K) and of b (N, K) -> a b^T (M, N) in dtype, summed in fp32."""
    return scaled_mm(a, a_scales, b, b_scales, dtype)


@register_fake(block_scaled_product)
def _(a, a_scales, b, b_scales, dtype):
    return a.new_empty(len(a), len(b), dtype=dtype)


def scaled_mm(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """block_scaled_product by torch's matmul. Tests replace this function."""
    (a, *a_scale), (b, *b_scale) = _typed(a, a_scales), _typed(b, b_scales)
    if not hasattr(F, "scaled_mm"):  # before torch 2.10
        product = torch._scaled_mm(a, b.t(), a_scale[0], b_scale[0], out_dtype=dtype)
        return product if len(a_scale) == 1 else product.mul_(a_scale[1] * b_scale[1])
    kind, order = F.ScalingType, F.SwizzleType
    recipe = [kind.BlockWise1x32] if len(a_scale) == 1 else [kind.BlockWise1x16, kind.TensorWise]
    orders = [order.SWIZZLE_32_4_4, order.NO_SWIZZLE][: len(recipe)]
    return F.scaled_mm(a, b.t(), a_scale, recipe, b_scale, recipe, orders, orders, output_dtype=dtype)


def _typed(codes: torch.Tensor, scales: torch.Tensor) -> list[torch.Tensor]:
    """Codes, scales of blocks, and nvfp4's global factor, in the dtypes by which torch knows the recipe."""
    if codes.dtype == E4M3:
        return [codes, scales.view(torch.float8_e8m0fnu)]
    blocks, factor = scales[:-FACTOR_BYTES].view(E4M3), scales[-FACTOR_BYTES:].view(torch.float32)
    return [codes.view(torch.float4_e2m1fn_x2), blocks, factor.view(())]


def numbers_and_factor(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A form's numbers, which bf16 holds exactly, in rows along the summed dimension; and what they are to be
    multiplied by, () fp32. The emulation rounds their products to bf16."""
    rows, width = codes.shape
    if codes.dtype == E4M3:
        form = mxfp8.Mxfp8(codes, from_tiles(scales, rows, width // 32), mxfp8.ALONG_ROWS)
        return mxfp8.dequantize(form), torch.ones((), device=codes.device)
    both = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
    blocks = from_tiles(scales[:-FACTOR_BYTES], rows, width // 8).view(E4M3)
    factor = scales[-FACTOR_BYTES:].view(torch.float32).view(())
    return nvfp4.dequantize_blocks(nvfp4.Nvfp4(both, blocks, factor, nvfp4.ALONG_ROWS)), factor


# --- casts ---


@custom_op("nanomfu::block_forms", mutates_args=())
def block_forms(
    x: torch.Tensor, amaxes: torch.Tensor | None = None, key: torch.Tensor | None = None
) -> Forms:
    """x (M, K), bf16 -> the fields of a BlockOperand. amaxes: None, in mxfp8; as nvfp4_amaxes(x) gives them,
    fp32 (2), in nvfp4, columns after the Hadamard transform; that of a weight, fp32 (1), in nvfp4 in squares.
    key (random_bits.random_key): stochastic rounding. ValueError: blocks do not divide M and K."""
    check_operand(x, (32, 32) if amaxes is None else nvfp4.SQUARE)
    if x.is_cuda:
        from recipes.kernels.block_scaled import triton_block_forms

        return triton_block_forms(x.contiguous(), amaxes, key, _empty(x, amaxes is not None))
    if amaxes is None:
        (rows, exponents, _), (columns, others, _) = (mxfp8.quantize(one) for one in (x, x.t().contiguous()))
        return rows, columns, to_tiles(exponents), to_tiles(others)
    if len(amaxes) == 1:
        first = second = nvfp4.quantize(x, nvfp4.SQUARE, amaxes)
    else:
        bits = [None if key is None else bits_of_operand(x, key, stream) for stream in (ROWS, COLUMNS)]
        first = nvfp4.quantize(x, nvfp4.ALONG_ROWS, amaxes[0], bits[0])
        second = nvfp4.quantize(random_hadamard(x, dim=0), nvfp4.ALONG_COLUMNS, amaxes[1], bits[1])
    rows, scales = _packed(first, first.codes, first.scales, first.block[0])
    columns, others = _packed(second, second.codes.t(), second.scales.t(), second.block[1])
    return rows, columns, scales, others


@register_fake(block_forms)
def _(x, amaxes=None, key=None):
    check_operand(x, (32, 32) if amaxes is None else nvfp4.SQUARE)
    return _empty(x, amaxes is not None)


def _packed(
    form: nvfp4.Nvfp4, codes: torch.Tensor, scales: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a form whose blocks have so many rows: each row gets scales of its own."""
    spread = to_tiles(scales.contiguous().view(torch.uint8).repeat_interleave(rows, 0))
    factor = nvfp4.global_factor(form).view(1).view(torch.uint8)
    codes = codes.contiguous()
    return codes[:, ::2] | (codes[:, 1::2] << 4), torch.cat((spread, factor))


def _empty(x: torch.Tensor, fp4: bool) -> Forms:
    (M, K), block, per_byte = x.shape, 16 if fp4 else 32, 1 + fp4
    codes = [x.new_empty(R, C // per_byte, dtype=torch.uint8 if fp4 else E4M3) for R, C in ((M, K), (K, M))]
    sizes = [512 * math.prod(tiles(R, C // block)) + FACTOR_BYTES * fp4 for R, C in ((M, K), (K, M))]
    scales = [x.new_empty(size, dtype=torch.uint8) for size in sizes]
    return codes[0], codes[1], scales[0], scales[1]
