"""A Linear in fp8 with one scale for a matrix, computed from it: fp8_tensorwise. ops/float8.py says how."""

from __future__ import annotations

import torch

from ops.activation import Activation
from ops.cross_entropy import cross_entropy_float8
from ops.float8 import (
    FORWARD,
    GRADIENT,
    add_float8_weight_gradient,
    amax_of,
    empty_like,
    matmul,
    quantize,
    requantize,
)
from ops.quantized_linear import Operand, Quantized, QuantizedLinear
from ops.swiglu import swiglu_backward_float8


class Float8Linear(QuantizedLinear):
    one_scale = True

    def known_amax(self, x: Activation) -> torch.Tensor | None:
        """What an opaque kernel wrote has a pass of its own: half as long as torch.compile's."""
        return amax_of(x.value) if x.amax is None and x.opaque else x.amax

    @staticmethod
    def quantize_input(x, amax, low):
        return quantize(x, FORWARD, amax)

    @staticmethod
    def quantize_gradient(dy, amax, low):
        return quantize(dy, low.gradient_dtype, amax)

    @staticmethod
    def swiglu_gradient(gate_up: torch.Tensor, dh: torch.Tensor, low: Quantized) -> Operand:
        """quantize_gradient of swiglu_backward(gate_up, dh), as it is written."""
        return swiglu_backward_float8(gate_up, dh, low.gradient_dtype)

    @staticmethod
    def loss_and_gradient(logits, targets, low):
        # never e4m3: beside the target's -1 it would round all probabilities below 2e-6 to 0
        return cross_entropy_float8(logits, targets, GRADIENT)

    @staticmethod
    def empty_weight(weight):
        return empty_like(weight)

    @staticmethod
    def requantize(weights, into):
        requantize(weights, [low.weight for low in into])

    @staticmethod
    def product(x, weight, dtype):
        return matmul(x.rows, weight.rows, x.inverse_scale, weight.inverse_scale, dtype, fast=True)

    @staticmethod
    def input_gradient(dy, kept, dtype):
        return matmul(dy.rows, kept.weight_columns, dy.inverse_scale, kept.weight_scale, dtype)

    @staticmethod
    def weight_gradient(dy, kept, dtype, total):
        operands = dy.columns, kept.x_columns, dy.inverse_scale, kept.x_scale
        if total is None:
            return matmul(*operands, dtype)
        return add_float8_weight_gradient(*operands, total)
