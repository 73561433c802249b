"""Linears whose operands have a scale for each block of numbers: mxfp8 and nvfp4.

Each operand of x w^T, dy w and dy^T x has two forms, both made from the bf16 matrix itself: `rows` for a
product that sums over its columns, `columns` for one that sums over its rows.

Emulated, both are bf16 matrices whose numbers are those of the format. bf16 holds every MXFP8 number, and
every NVFP4 number but for its global factor. So an ordinary bf16 matmul of such operands is what Blackwell's
tensor cores compute, up to the order of sums, on any GPU and on a CPU. It is no faster than bf16. The product
with NVFP4's global factor is rounded to bf16, which changes the result of a matmul by 0.24 %; the format
itself changes it by 14.5 % (tests/unit/test_quantization_blocks.py has both without that rounding).

torch.compile does not see into the casts: it would divide approximately and keep more digits than bf16 has.
On a GPU each is one kernel (kernels/mxfp8.py, nvfp4.py), with the same bits.

M tokens · K, N widths
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ops.activation import Activation
from ops.linear import InPlaceOf, Linear, weight_gradient
from ops.losses import cross_entropy
from recipes.formats.blocks import Block, number_of_blocks


class Emulated(NamedTuple):
    """A matrix (M, N) for two matmuls, in bf16."""

    rows: torch.Tensor
    columns: torch.Tensor


class BlockLinear(InPlaceOf):
    """How it multiplies is the emulation; block_scaled.py has another way, whose operands are its own."""

    keeps_input = False
    multiple = 16  # rows of an operand are a multiple of it, also in an evaluation
    quantized: Any  # the weight

    def __init__(self, layer: Linear, key: torch.Tensor | None = None):
        """key: of the random bits of gradients, int64 (4), if they are rounded stochastically."""
        super().__init__(layer)
        self.key = key
        self.quantized = self.empty_weight(layer.weight)  # filled by refresh()

    def project(self, x: Activation, tells_amax: bool = False) -> Activation:
        y = BlockMatmul.apply(x.value, self.weight, self)
        return Activation(y, bias=None if self.bias is None else self.bias.to(y.dtype))

    def loss_part(self, x, targets, weight, dweight, scale):
        logits, kept = self.multiply(x)
        losses = cross_entropy(logits, targets, dweight is not None)
        if dweight is None:
            return losses.sum(), None
        d = self.quantize_logits_gradient(logits)  # by now, they are their gradient
        del logits
        self.weight_gradient(d, kept, x.dtype, dweight)
        return losses.sum(), self.input_gradient(d, kept, x.dtype)

    def can_scale_sum(self, dtype):
        return False

    def copies(self):
        return self.quantized._asdict()

    @staticmethod
    def refresh(layers):
        for layer in layers:
            for written, form in zip(layer.quantized, layer.quantize_weight(), strict=True):
                written.copy_(form)

    def multiply(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """x (M, K) -> x w^T (M, N), and what the backward needs. An evaluation may have any M: rows of zeros
        are added. In training M is a multiple (training/optimization/low_precision.py)."""
        M = len(x)
        if short := -M % self.multiple:
            x = F.pad(x, (0, 0, 0, short))
        operand = self.quantize(x)
        y = self.product(operand, x.dtype)
        return (y[:M] if short else y), self.kept(operand)

    # --- a format; operands are tuples of tensors, which only their own class looks into ---

    @abstractmethod
    def empty_weight(self, weight: torch.Tensor) -> tuple:
        """Room for a weight (N, K)."""

    @abstractmethod
    def quantize_weight(self) -> tuple:
        """The weight, rounded to bf16, as empty_weight() has room for it."""

    @abstractmethod
    def quantize(self, x: torch.Tensor) -> tuple:
        """x (M, K)."""

    def quantize_gradient(self, dy: torch.Tensor) -> tuple:
        """dy (M, N)."""
        return self.quantize(dy)

    def quantize_logits_gradient(self, logits: torch.Tensor) -> tuple:
        """(M, V), the probabilities less 1 at the targets: most are far below 1e-6, and none is above 1."""
        return self.quantize_gradient(logits)

    # --- the matmuls: y = x w^T, dx = dy w, dw = dy^T x ---

    def kept(self, x) -> tuple[torch.Tensor, ...]:
        """Of x and the weight, what the two gradients need."""
        return x.columns, self.quantized.columns

    def product(self, x, dtype: torch.dtype) -> torch.Tensor:
        return F.linear(x.rows, self.quantized.rows)

    def input_gradient(self, dy, kept: tuple, dtype: torch.dtype) -> torch.Tensor:
        return dy.rows @ kept[-1]

    def weight_gradient(
        self, dy, kept: tuple, dtype: torch.dtype, total: torch.Tensor | None
    ) -> torch.Tensor | None:
        """(N, K); None, if it was added to total, in fp32."""
        return weight_gradient(dy.columns, kept[0], total)


class BlockMatmul(torch.autograd.Function):
    """x (..., K), weight (N, K), for autograd, and its layer -> x weight^T (..., N)."""

    @staticmethod
    def forward(ctx, x, weight, layer: BlockLinear):
        y, kept = layer.multiply(x.flatten(0, -2))
        ctx.save_for_backward(*kept)
        ctx.layer = layer
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, dy):
        layer, kept = ctx.layer, ctx.saved_tensors
        operand = layer.quantize_gradient(dy.flatten(0, -2))
        dx = layer.input_gradient(operand, kept, dy.dtype)
        dweight = layer.weight_gradient(operand, kept, dy.dtype, layer.weight_grad)
        return dx.unflatten(0, dy.shape[:-1]), dweight, None


def check_operand(x: torch.Tensor, *blocks: Block) -> None:
    """ValueError: x is not bf16, or a block does not divide it."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"emulated operands are bf16, not {x.dtype}; cast the matrix first")
    for block in blocks:
        number_of_blocks(x, block)
