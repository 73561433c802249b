"""A Linear whose matmul operands are quantized. A recipe is a subclass that says how: ops/float8_linear.py,
ops/recipes/. convert() puts it in place.

Activations and gradients are quantized where they are used, weights once an iteration (refresh_weights).
Everything else is bf16 or fp32: residual stream, norms, attention, loss, sums of weight gradients.

    forward          y  = x w^T    sums over the columns of x and of w
    input gradient   dx = dy w     sums over the columns of dy, the rows of w
    weight gradient  dw = dy^T x   sums over the rows of dy, the rows of x

So x, w and dy each have two forms, both made from the bf16 matrix itself: `rows` for a product that sums over
its columns, `columns` for one that sums over its rows.

M tokens · K, N widths
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops.activation import Activation
from ops.linear import Linear


class Operand(NamedTuple):
    """A matrix (M, N) for two matmuls. In fp8, columns is transposed, (N, M), contiguous, and either form
    times inverse_scale, () fp32, is about the matrix. Emulated: both forms are (M, N) in bf16. For matmuls of
    scaled blocks, ops/recipes/block_scaled.py has another one."""

    rows: torch.Tensor
    columns: torch.Tensor
    inverse_scale: torch.Tensor = None  # type: ignore[assignment]  # emulated operands have none


class Quantized(NamedTuple):
    """What the functions of a QuantizedLinear get beside its weight (N, K)."""

    kind: type[QuantizedLinear]  # whose static methods quantize and multiply
    weight: Operand
    gradient_dtype: torch.dtype  # of fp8 gradients
    gradient_sum: torch.Tensor | None  # (N, K) fp32, to which the backward adds the weight's gradient
    state: Any  # what the recipe keeps of this layer from one micro-step to the next


class Kept(NamedTuple):
    """What the backward of y = x w^T needs of x and w."""

    x_columns: torch.Tensor
    x_scale: torch.Tensor | None
    weight_columns: torch.Tensor
    weight_scale: torch.Tensor | None


class QuantizedLinear(Linear):
    """What a recipe defines: the abstract methods. amax is that of the matrix, if somebody knows it
    (ops/activation.py)."""

    multiple = 1  # rows of an operand are a multiple of it, also in an evaluation
    one_scale = False  # for a whole matrix, so that whoever writes it can help: with its amax, or in fp8

    quantized: Operand
    gradient_dtype: torch.dtype
    state: Any = None

    def project(self, x: Activation, tells_amax: bool = False) -> Activation:
        tells_amax = tells_amax and self.one_scale and x.value.is_cuda
        found = QuantizedMatmul.apply(
            x.value, self.known_amax(x), self.weight, self.low_precision, tells_amax
        )
        y, gradient_amax = found if tells_amax else (found, None)
        bias = None if self.bias is None else self.bias.to(y.dtype)
        return Activation(y, gradient_amax=gradient_amax, bias=bias)

    def known_amax(self, x: Activation) -> torch.Tensor | None:
        return x.amax

    @property
    def low_precision(self) -> Quantized:
        """For a function, beside the weight by itself: autograd looks for tensors that need gradients among a
        function's own arguments and not inside them."""
        return Quantized(type(self), self.quantized, self.gradient_dtype, self.weight_grad, self.state)

    # --- a recipe ---

    @staticmethod
    @abstractmethod
    def quantize_input(x: torch.Tensor, amax: torch.Tensor | None, low: Quantized) -> Operand:
        """x (M, K)."""

    @staticmethod
    @abstractmethod
    def quantize_gradient(dy: torch.Tensor, amax: torch.Tensor | None, low: Quantized) -> Operand:
        """dy (M, N)."""

    @staticmethod
    @abstractmethod
    def loss_and_gradient(
        logits: torch.Tensor, targets: torch.Tensor, low: Quantized
    ) -> tuple[torch.Tensor, Operand]:
        """logits (M, V), targets (M,) -> the losses (M,), and the quantized gradient of the logits, the
        probabilities less 1 at the targets: most are far below 1e-6, and none is above 1. Overwrites the
        logits."""

    @staticmethod
    @abstractmethod
    def empty_weight(weight: torch.Tensor) -> Operand:
        """Room for a weight (N, K); requantize() fills it."""

    @staticmethod
    @abstractmethod
    def requantize(weights: Sequence[torch.Tensor], into: Sequence[Quantized]) -> None:
        """Writes weights, rounded to bf16, into the tensors of `into`, whose addresses stay: captured code
        has them."""

    @staticmethod
    @abstractmethod
    def product(x: Operand, weight: Operand, dtype: torch.dtype) -> torch.Tensor:
        """x w^T (M, N) in dtype."""

    @staticmethod
    def kept(x: Operand, weight: Operand) -> Kept:
        return Kept(x.columns, x.inverse_scale, weight.columns, weight.inverse_scale)

    @staticmethod
    @abstractmethod
    def input_gradient(dy: Operand, kept: Kept, dtype: torch.dtype) -> torch.Tensor:
        """dy w (M, K) in dtype."""

    @staticmethod
    @abstractmethod
    def weight_gradient(
        dy: Operand, kept: Kept, dtype: torch.dtype, total: torch.Tensor | None
    ) -> torch.Tensor | None:
        """dy^T x (N, K) in dtype; None, if it was added to total, in fp32."""


class QuantizedMatmul(torch.autograd.Function):
    """x (..., K), its amax or None, weight (N, K) -> x weight^T (..., N); if tells_amax, with a
    gradient_amax (ops/activation.py)."""

    @staticmethod
    def forward(ctx, x, amax, weight, low: Quantized, tells_amax: bool):
        y, kept = matmul(x.flatten(0, -2), amax, low)
        ctx.save_for_backward(*kept)
        ctx.low = low
        y = y.unflatten(0, x.shape[:-1])
        return (y, y.new_empty((), dtype=torch.float32)) if tells_amax else y

    @staticmethod
    def backward(ctx, dy, dy_amax=None):
        operand = ctx.low.kind.quantize_gradient(dy.flatten(0, -2), dy_amax, ctx.low)
        dx, dweight = matmul_backward(operand, Kept(*ctx.saved_tensors), ctx.low, dy.dtype)
        return dx.unflatten(0, dy.shape[:-1]), None, dweight, None, None


def matmul(x: torch.Tensor, amax: torch.Tensor | None, low: Quantized) -> tuple[torch.Tensor, Kept]:
    """x (M, K) -> x w^T (M, N), and what the backward needs. An evaluation may have any M: rows of zeros
    are added. In training M is a multiple (training/optimization/low_precision.py)."""
    M, weight = len(x), low.weight
    if short := -M % low.kind.multiple:
        x = F.pad(x, (0, 0, 0, short))
    operand = low.kind.quantize_input(x, amax, low)
    y = low.kind.product(operand, weight, x.dtype)
    kept = low.kind.kept(operand, weight)
    return (y[:M] if short else y), kept


def matmul_backward(
    dy: Operand, kept: Kept, low: Quantized, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx (M, K), and the weight's gradient (N, K) if there is no sum that it is added to."""
    dx = low.kind.input_gradient(dy, kept, dtype)
    return dx, low.kind.weight_gradient(dy, kept, dtype, low.gradient_sum)


def convert(model: nn.Module, recipe: Callable[[Linear, str], None]) -> None:
    """Calls recipe(layer, its path in the model) for every Linear; it may call convert_layer."""
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            recipe(module, path)


def convert_layer(
    layer: Linear, kind: type[QuantizedLinear], gradient_dtype: torch.dtype, state: Any = None
) -> None:
    """The layer, which stays the same object, computes as `kind` says from now on; refresh_weights() fills
    its quantized weight."""
    assert not layer.recomputes_input, "recompute() chooses by what a layer keeps: it comes later"
    layer.__class__ = kind
    assert isinstance(layer, QuantizedLinear)
    layer.quantized = kind.empty_weight(layer.weight)
    layer.gradient_dtype, layer.state = gradient_dtype, state


@torch.no_grad()
def refresh_weights(model: nn.Module) -> None:
    """Quantizes every weight in low precision from its working copy in bf16: once per iteration, after the
    update."""
    layers: dict[type[QuantizedLinear], list[QuantizedLinear]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            layers.setdefault(type(module), []).append(module)
    for kind, of_kind in layers.items():
        kind.requantize([layer.weight for layer in of_kind], [layer.low_precision for layer in of_kind])
