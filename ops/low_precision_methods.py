"""Methods of low precision: how each recipe of ops/recipes.py makes operands, and how it multiplies them.

    Scaled     fp8 operands with one scale each, multiplied by tensor cores (ops/float8.py); the scale may
               come from earlier micro-steps (ops/delayed_float8.py)
    Emulated   operands whose numbers are those of the recipe, held in bf16, multiplied in bf16. The result is
               that of the recipe's tensor cores, up to the order of sums; it is no faster: ops/emulation.py

M tokens · K, N widths
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ops import emulation, float8
from ops.delayed_float8 import delayed_quantize, delayed_requantize
from ops.matmul import Operand, add_weight_gradient
from ops.quantization.hadamard import random_hadamard
from ops.recipes import ALIGNMENTS

HADAMARD_ROWS = 256  # of logits, transformed at a time: its fp32 copies are some hundred MiB


class Scaling(NamedTuple):
    """What delayed scaling knows of one tensor: () fp32 each, views into tensors of the whole model."""

    scale: torch.Tensor
    amax: torch.Tensor


class LowPrecision(NamedTuple):
    """What a Linear in low precision has beside its weight (N, K)."""

    method: str  # of METHODS
    gradient_dtype: torch.dtype  # of fp8 gradients
    weight: Operand
    gradient_sum: torch.Tensor | None = None  # (N, K) fp32, to which the backward adds the weight's gradient
    key: torch.Tensor | None = None  # int64 (4), what random bits are for (ops/quantization/random_bits.py)
    scalings: tuple[Scaling, Scaling, Scaling] | None = None  # of x, w and dy


class Kept(NamedTuple):
    """What the backward of y = x w^T needs of x and w."""

    x_columns: torch.Tensor
    x_scale: torch.Tensor | None
    weight_columns: torch.Tensor
    weight_scale: torch.Tensor | None


# --- methods ---


class Method(ABC):
    """Makes operands and multiplies them. amax: of the matrix, if somebody knows it (ops/float8.py)."""

    one_scale = False  # for a whole matrix, so that whoever writes it can help; else emulated in bf16
    multiple = 1  # rows of an operand are a multiple of it

    @abstractmethod
    def activation(self, x: torch.Tensor, amax: torch.Tensor | None, low: LowPrecision) -> Operand:
        """x (M, K)."""

    @abstractmethod
    def gradient(self, dy: torch.Tensor, amax: torch.Tensor | None, low: LowPrecision) -> Operand:
        """dy (M, N)."""

    def gradient_of_logits(self, dy: torch.Tensor, low: LowPrecision) -> Operand:
        """dy (M, V), the probabilities less 1 at the targets: most of them are far below 1e-6, and none is
        above 1."""
        return self.gradient(dy, None, low)

    @abstractmethod
    def empty_weight(self, weight: torch.Tensor) -> Operand:
        """Room for a weight (N, K); requantize() fills it."""

    @abstractmethod
    def requantize(self, weights: Sequence[torch.Tensor], into: Sequence[LowPrecision]) -> None:
        """Writes weights, rounded to bf16, into the tensors of `into`, whose addresses stay: captured code
        has them."""

    @abstractmethod
    def forward(self, x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
        """x w^T (M, N) in dtype."""

    @abstractmethod
    def input_gradient(self, dy: Operand, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """dy w (M, K) in dtype."""

    @abstractmethod
    def weight_gradient(self, dy: Operand, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """dy^T x (N, K) in dtype."""

    @abstractmethod
    def add_weight_gradient(self, dy: Operand, kept: Kept, total: torch.Tensor) -> None:
        """total (N, K) fp32 += dy^T x."""


class Scaled(Method):
    """fp8, one scale for a matrix, computed from it: fp8_tensorwise."""

    one_scale = True

    def activation(self, x, amax, low):
        return float8.quantize(x, float8.FORWARD, amax)

    def gradient(self, dy, amax, low):
        return float8.quantize(dy, low.gradient_dtype, amax)

    def empty_weight(self, weight):
        return float8.empty_like(weight)

    def requantize(self, weights, into):
        float8.requantize(weights, [low.weight for low in into])

    def forward(self, x, weight, dtype):
        return float8.matmul(x.rows, weight.rows, x.inverse_scale, weight.inverse_scale, dtype, fast=True)

    def input_gradient(self, dy, kept, dtype):
        return float8.matmul(dy.rows, kept.weight_columns, dy.inverse_scale, kept.weight_scale, dtype)

    def weight_gradient(self, dy, kept, dtype):
        return float8.matmul(dy.columns, kept.x_columns, dy.inverse_scale, kept.x_scale, dtype)

    def add_weight_gradient(self, dy, kept, total):
        float8.add_float8_weight_gradient(dy.columns, kept.x_columns, dy.inverse_scale, kept.x_scale, total)


class Delayed(Scaled):
    """fp8, one scale for a matrix, computed from its amaxes in earlier micro-steps: fp8_delayed."""

    def activation(self, x, amax, low):
        scale, found = low.scalings[0]
        return delayed_quantize(x, scale, found, float8.FORWARD, amax)

    def gradient(self, dy, amax, low):
        scale, found = low.scalings[2]
        return delayed_quantize(dy, scale, found, low.gradient_dtype, amax)

    def requantize(self, weights, into):
        scales, amaxes = zip(*(low.scalings[1] for low in into), strict=True)
        torch._foreach_zero_(list(amaxes))  # a checkpoint may have replaced the weights that they are of
        delayed_requantize(weights, [low.weight for low in into], scales, amaxes)


class Emulated(Method):
    """Multiplies in bf16."""

    def forward(self, x, weight, dtype):
        return F.linear(x.rows, weight.rows)

    def input_gradient(self, dy, kept, dtype):
        return dy.rows @ kept.weight_columns

    def weight_gradient(self, dy, kept, dtype):
        return dy.columns.t() @ kept.x_columns

    def add_weight_gradient(self, dy, kept, total):
        add_weight_gradient(dy.columns, kept.x_columns, total)


class Mxfp8(Emulated):
    multiple = ALIGNMENTS["mxfp8"]

    def activation(self, x, amax, low):
        return Operand(*emulation.mxfp8_operand(x))

    def gradient(self, dy, amax, low):
        return Operand(*emulation.mxfp8_operand(dy))

    def empty_weight(self, weight):
        return Operand(_empty_bf16(weight), _empty_bf16(weight))

    def requantize(self, weights, into):
        for weight, low in zip(weights, into, strict=True):
            rows, columns = emulation.mxfp8_operand(weight.to(torch.bfloat16))
            low.weight.rows.copy_(rows)
            low.weight.columns.copy_(columns)


class Nvfp4(Emulated):
    multiple = ALIGNMENTS["nvfp4"]

    def activation(self, x, amax, low):
        return Operand(*_nvfp4(x, None))

    def gradient(self, dy, amax, low):
        return Operand(*_nvfp4(dy, low.key))

    def gradient_of_logits(self, dy, low):
        """In bf16: fp4 would round every probability below 2e-6 to 0."""
        columns = torch.empty_like(dy)
        for written, rows in zip(columns.split(HADAMARD_ROWS), dy.split(HADAMARD_ROWS), strict=True):
            written.copy_(random_hadamard(rows, dim=0))
        return Operand(dy, columns)

    def empty_weight(self, weight):
        both = _empty_bf16(weight)  # blocks are square
        return Operand(both, both)

    def requantize(self, weights, into):
        for weight, low in zip(weights, into, strict=True):
            rounded = weight.to(torch.bfloat16)
            low.weight.rows.copy_(emulation.nvfp4_weight(rounded, rounded.abs().amax().float()))


METHODS: dict[str, Method] = {
    "fp8_tensorwise": Scaled(),
    "fp8_delayed": Delayed(),
    "mxfp8": Mxfp8(),
    "nvfp4": Nvfp4(),
}


def _nvfp4(x: torch.Tensor, key: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return emulation.nvfp4_operand(x, emulation.nvfp4_amaxes(x), key)


def _empty_bf16(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight, dtype=torch.bfloat16)
