"""A Linear in the precision and with the gradient sum that it was given; the refresh of quantized weights.

M tokens · K, N widths
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops.low_precision import LowPrecisionLinear
from ops.low_precision_methods import METHODS, LowPrecision
from ops.matmul import add_weight_gradient
from ops.norm import Delta


class Linear(nn.Linear):
    """A Linear that computes in its input's dtype, whatever its weight is stored in: the precision policy.

    weight_grad, if a strategy sets it, is the fp32 sum (out, in) that the backward adds the weight's gradient
    to; weight.grad then stays None. low_precision, if training/optimization/low_precision.py sets it, is the
    recipe of its matmuls and its quantized weight.
    """

    weight_grad: torch.Tensor | None = None
    low_precision: LowPrecision | None = None

    def forward(self, x: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
        """amax: of x, if it is known (ops/float8.py); low precision alone uses it."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.low_precision is not None:
            y = LowPrecisionLinear.apply(x, amax, *self.low_precision_arguments, False)
        elif self.weight_grad is not None:
            y = LinearFunction.apply(x, self.weight, self.weight_grad)
        else:
            return F.linear(x, self.weight.to(x.dtype), bias)
        return y if bias is None else y + bias

    def delta(self, x: torch.Tensor, amax: torch.Tensor | None, gradient_amax: bool) -> Delta:
        """forward(), for the residual stream. gradient_amax: whether what adds it can find the amax of its
        gradient, which one scale for a whole matrix alone wants."""
        if not self.has_one_scale or self.bias is not None or not (gradient_amax and x.is_cuda):
            return self(x, amax), None
        return LowPrecisionLinear.apply(x, amax, *self.low_precision_arguments, True)

    @property
    def has_one_scale(self) -> bool:
        """Whether operands have one scale each, so that it helps to know their amax."""
        return self.low_precision is not None and METHODS[self.low_precision.method].one_scale

    @property
    def low_precision_arguments(self) -> tuple[torch.Tensor, LowPrecision]:
        """The weight as functions in low precision take it: the parameter by itself, because autograd looks
        for tensors that need gradients among a function's own arguments and not inside them."""
        assert self.low_precision is not None
        method, dtype, weight, _, key, scalings = self.low_precision
        return self.weight, LowPrecision(method, dtype, weight, self.weight_grad, key, scalings)


class LinearFunction(torch.autograd.Function):
    """x (..., K), weight (N, K) -> x weight^T (..., N). The backward adds the weight's gradient to
    `total`.

    Autograd would write it in the weight's dtype, read it back, and add it to an fp32 sum in another pass.
    """

    @staticmethod
    def forward(ctx, x, weight, total):
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        add_weight_gradient(dy.flatten(0, -2), x.flatten(0, -2), ctx.total)
        return dy @ weight, None, None


@torch.no_grad()
def refresh_weights(model: nn.Module) -> None:
    """Quantizes every weight in low precision from its working copy in bf16: once per iteration, after the
    update."""
    layers = [m for m in model.modules() if isinstance(m, Linear) and m.low_precision is not None]
    if layers:
        found = [layer.low_precision for layer in layers if layer.low_precision is not None]
        METHODS[found[0].method].requantize([layer.weight for layer in layers], into=found)
