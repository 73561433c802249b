"""A Linear in the precision and with the gradient sum that it was given, and the refresh of its fp8 weights.

M tokens · K, N widths
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from ops import float8
from ops.float8 import Float8, Float8Linear, Float8Weight
from ops.matmul import chosen, input_gradient, linear
from ops.norm import Delta


class Linear(nn.Linear):
    """A Linear that computes in its input's dtype, whatever its weight is stored in: the precision policy.

    weight_grad, if a strategy sets it, is the fp32 sum (out, in) that the backward adds the weight's gradient
    to; weight.grad then stays None. float8, if training/optimization/precision.py sets it, is the weight in
    fp8, and the matmuls are fp8.
    """

    weight_grad: torch.Tensor | None = None
    float8: Float8 | None = None

    def forward(self, x: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
        """amax: of x, if it is known (ops/float8.py); fp8 alone uses it."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.float8 is not None:
            y = Float8Linear.apply(x, amax, *self.float8_arguments, False)
        elif self.weight_grad is not None:
            y = LinearFunction.apply(x, self.weight, self.weight_grad)
        elif chosen.plans_exist:
            y = LinearFunction.apply(x, self.weight.to(x.dtype), None)
        else:
            return F.linear(x, self.weight.to(x.dtype), bias)
        return y if bias is None else y + bias

    def delta(self, x: torch.Tensor, amax: torch.Tensor | None, gradient_amax: bool) -> Delta:
        """forward(), for the residual stream. gradient_amax: whether what adds it can find the amax of its
        gradient, which fp8 alone wants."""
        if self.float8 is None or self.bias is not None or not (gradient_amax and x.is_cuda):
            return self(x, amax), None
        return Float8Linear.apply(x, amax, *self.float8_arguments, True)

    @property
    def float8_arguments(self) -> tuple[torch.Tensor, Float8Weight]:
        """The weight as fp8 functions take it: the parameter by itself, because autograd looks for tensors
        that need gradients among a function's own arguments and not inside them."""
        assert self.float8 is not None
        return self.weight, Float8Weight(self.float8, self.weight_grad)


class LinearFunction(torch.autograd.Function):
    """x (..., K), weight (N, K) -> x weight^T (..., N). The backward adds the weight's gradient to
    `total`, if there is one.

    Autograd would write it in the weight's dtype, read it back, and add it to an fp32 sum in another pass.
    """

    @staticmethod
    def forward(ctx, x, weight, total):
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        rows, x_rows, dweight = dy.flatten(0, -2), x.flatten(0, -2), None
        if ctx.total is None:
            dweight = rows.t() @ x_rows
        else:
            add_weight_gradient(rows, x_rows, ctx.total)
        return input_gradient(dy, weight), dweight, None


@custom_op("nanomfu::add_weight_gradient", mutates_args=("total",))
def add_weight_gradient(dy: torch.Tensor, x: torch.Tensor, total: torch.Tensor) -> None:
    """total (N, K) fp32 += dy (M, N)^T x (M, K), which a GPU's matmul does as it writes its result."""
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    elif dy.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, dy.t(), x, total.dtype, out=total)
    else:
        total.addmm_(dy.t().to(total.dtype), x.to(total.dtype))


@add_weight_gradient.register_fake
def _(dy, x, total):
    return None


@register_flop_formula(torch.ops.nanomfu.add_weight_gradient)
def _(dy_shape, x_shape, total_shape, *args, **kwargs) -> int:
    return 2 * dy_shape[0] * dy_shape[1] * x_shape[1]


@torch.no_grad()
def refresh_weights(model: nn.Module) -> None:
    """Quantizes every fp8 weight from its working copy in bf16: once per iteration, after the update."""
    found = [(m.weight, m.float8) for m in model.modules() if isinstance(m, Linear) and m.float8 is not None]
    float8.requantize([weight for weight, _ in found], into=[written for _, written in found])
