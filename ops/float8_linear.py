"""A Linear in fp8 with one scale for a matrix: fp8_tensorwise. ops/float8.py says how.

Activations and gradients are quantized where they are used, weights once an iteration (refresh_weights).
Everything else is bf16 or fp32: residual stream, norms, attention, loss, sums of weight gradients.

    forward          y  = x w^T    sums over the columns of x and of w
    input gradient   dx = dy w     sums over the columns of dy, the rows of w
    weight gradient  dw = dy^T x   sums over the rows of dy, the rows of x

M tokens · K, N widths
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ops.activation import Activation
from ops.float8 import (
    FORWARD,
    GRADIENT,
    Operand,
    add_float8_weight_gradient,
    amax_of,
    empty_like,
    matmul,
    quantize,
    requantize,
)
from ops.linear import InPlaceOf, Linear
from ops.losses import cross_entropy, cross_entropy_float8
from ops.swiglu import swiglu_backward_float8

MULTIPLE = 16  # torch's fp8 matmul wants tokens and both widths to be multiples of it


class Kept(NamedTuple):
    """What the backward of y = x w^T needs of x and w."""

    x_columns: torch.Tensor
    x_scale: torch.Tensor
    weight_columns: torch.Tensor
    weight_scale: torch.Tensor


class Float8Linear(InPlaceOf):
    """amax is that of a matrix, if somebody knows it (ops/activation.py). A subclass may take its scales from
    elsewhere: quantize_input(), quantize_gradient(), swiglu_gradient() and refresh()."""

    keeps_input = False

    def __init__(self, layer: Linear, gradient_dtype: torch.dtype = GRADIENT):
        super().__init__(layer)
        self.gradient_dtype = gradient_dtype
        self.quantized = empty_like(layer.weight)  # filled by refresh()

    def project(self, x: Activation, tells_amax: bool = False) -> Activation:
        tells_amax = tells_amax and x.value.is_cuda
        # what an opaque kernel wrote has a pass of its own: half as long as torch.compile's
        amax = amax_of(x.value) if x.amax is None and x.opaque else x.amax
        found = Float8Matmul.apply(x.value, amax, self.weight, self, tells_amax)
        y, gradient_amax = found if tells_amax else (found, None)
        bias = None if self.bias is None else self.bias.to(y.dtype)
        return Activation(y, gradient_amax=gradient_amax, bias=bias)

    def loss_part(self, x, targets, weight, dweight, scale):
        logits, kept = self.multiply(x, None)
        if dweight is None:
            return cross_entropy(logits, targets, gradient=False).sum(), None
        # never e4m3: beside the target's -1 it would round all probabilities below 2e-6 to 0
        losses, d = cross_entropy_float8(logits, targets, GRADIENT)
        del logits
        if scale is not None:
            kept = kept._replace(x_scale=kept.x_scale * scale)
        self.weight_gradient(d, kept, x.dtype, dweight)
        return losses.sum(), self.input_gradient(d, kept, x.dtype)

    def can_scale_sum(self, dtype):
        return True

    def copies(self):
        return self.quantized._asdict()

    @staticmethod
    def refresh(layers):
        requantize([layer.weight for layer in layers], [layer.quantized for layer in layers])

    # --- quantization ---

    def quantize_input(self, x: torch.Tensor, amax: torch.Tensor | None) -> Operand:
        return quantize(x, FORWARD, amax)

    def quantize_gradient(self, dy: torch.Tensor, amax: torch.Tensor | None) -> Operand:
        return quantize(dy, self.gradient_dtype, amax)

    def swiglu_gradient(self, gate_up: torch.Tensor, dh: torch.Tensor) -> Operand:
        """quantize_gradient of swiglu_backward(gate_up, dh), as it is written."""
        return swiglu_backward_float8(gate_up, dh, self.gradient_dtype)

    # --- matmuls ---

    def multiply(self, x: torch.Tensor, amax: torch.Tensor | None) -> tuple[torch.Tensor, Kept]:
        """x (M, K) -> x w^T (M, N), and what the backward needs. An evaluation may have any M: rows of zeros
        are added. In training M is a multiple (training/optimization/low_precision.py)."""
        M, w = len(x), self.quantized
        if short := -M % MULTIPLE:
            x = F.pad(x, (0, 0, 0, short))
        operand = self.quantize_input(x, amax)
        y = matmul(operand.rows, w.rows, operand.inverse_scale, w.inverse_scale, x.dtype, fast=True)
        kept = Kept(operand.columns, operand.inverse_scale, w.columns, w.inverse_scale)
        return (y[:M] if short else y), kept

    def gradients(
        self, dy: Operand, kept: Kept, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dx (M, K) in dtype, and the weight's gradient (N, K) if there is no sum that it is added to."""
        dx = self.input_gradient(dy, kept, dtype)
        return dx, self.weight_gradient(dy, kept, dtype, self.weight_grad)

    def input_gradient(self, dy: Operand, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        return matmul(dy.rows, kept.weight_columns, dy.inverse_scale, kept.weight_scale, dtype)

    def weight_gradient(
        self, dy: Operand, kept: Kept, dtype: torch.dtype, total: torch.Tensor | None
    ) -> torch.Tensor | None:
        operands = dy.columns, kept.x_columns, dy.inverse_scale, kept.x_scale
        if total is None:
            return matmul(*operands, dtype)
        return add_float8_weight_gradient(*operands, total)


class Float8Matmul(torch.autograd.Function):
    """x (..., K), its amax or None, weight (N, K), for autograd, and its layer -> x weight^T (..., N); if
    tells_amax, with a gradient_amax (ops/activation.py)."""

    @staticmethod
    def forward(ctx, x, amax, weight, layer: Float8Linear, tells_amax: bool):
        y, kept = layer.multiply(x.flatten(0, -2), amax)
        ctx.save_for_backward(*kept)
        ctx.layer = layer
        y = y.unflatten(0, x.shape[:-1])
        return (y, y.new_empty((), dtype=torch.float32)) if tells_amax else y

    @staticmethod
    def backward(ctx, dy, dy_amax=None):
        operand = ctx.layer.quantize_gradient(dy.flatten(0, -2), dy_amax)
        dx, dweight = ctx.layer.gradients(operand, Kept(*ctx.saved_tensors), dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), None, dweight, None, None
