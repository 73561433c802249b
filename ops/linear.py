"""A Linear that computes in its input's dtype, and may add its weight's gradient to a sum in fp32.

M tokens · C, N, K widths
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from ops.activation import Activation, Delta
from ops.custom_op import custom_op, register_fake
from ops.norm import norm_again


class Linear(nn.Linear):
    """A Linear that computes in its input's dtype, whatever its weight is stored in.

    weight_grad, if a strategy sets it, is the fp32 sum (out, in) that the backward adds the weight's gradient
    to; weight.grad then stays None. The next two are set by ops/recompute.py.
    """

    weight_grad: torch.Tensor | None = None
    recomputes_input = False  # in the backward, if what came says how
    ends_recomputation = False  # this product is the last of what torch.utils.checkpoint() repeats
    low_precision: Any = None  # the Quantized of a subclass in ops/quantized_linear.py

    def forward(self, x: torch.Tensor | Activation) -> torch.Tensor:
        return self.project(Activation.of(x)).with_bias()

    def activation(self, x: torch.Tensor | Activation) -> Activation:
        """forward(), for an operation that takes an Activation; it may still have to add the bias."""
        return self.project(Activation.of(x), tells_amax=True)

    def delta(self, x: torch.Tensor | Activation) -> Delta:
        """forward(), for the residual stream."""
        y = self.project(Activation.of(x), tells_amax=True)
        return y.with_bias(), y.gradient_amax

    def project(self, x: Activation, tells_amax: bool = False) -> Activation:
        """The product and, if tells_amax and if it helps, a gradient_amax (ops/activation.py)."""
        value, learns = x.value, torch.is_grad_enabled()
        weight, bias, added = self.operands(value.dtype)
        if learns and self.recomputes_input and x.source is not None:
            y = NormLinear.apply(value, *x.source, weight, bias, self.weight_grad)
        elif self.weight_grad is None:
            y = F.linear(value, weight, bias)
        elif learns and self.ends_recomputation and not torch.compiler.is_compiling():
            # checkpoint() stops once the last tensor to be kept is there, here before the product; compiled
            # code leaves out by itself what nothing reads
            gradients = _Gradients.apply(value, weight, self.weight_grad)
            y = _Product.apply(gradients, value.detach(), weight.detach())
        else:
            y = LinearFunction.apply(value, weight, self.weight_grad)
        return Activation(y, bias=added)

    def operands(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The weight, a bias for inside of the matmul, and one to be added after it."""
        bias = None if self.bias is None else self.bias.to(dtype)
        if self.weight_grad is not None:
            return self.weight, None, bias
        return self.weight.to(dtype), bias, None


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


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor | None:
    """dy (..., N), x (..., K) -> (N, K), or None, if it was added to total."""
    rows, x_rows = dy.flatten(0, -2), x.flatten(0, -2)
    if total is None:
        return rows.t() @ x_rows
    add_weight_gradient(rows, x_rows, total)
    return None


@custom_op("nanomfu::add_weight_gradient", mutates_args=("total",))
def add_weight_gradient(dy: torch.Tensor, x: torch.Tensor, total: torch.Tensor) -> None:
    """total (N, K) fp32 += dy (M, N)^T x (M, K), which a GPU's matmul does as it writes its result."""
    if total.dtype == dy.dtype:
        total.addmm_(dy.t(), x)
    elif dy.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, dy.t(), x, total.dtype, out=total)
    else:
        total.addmm_(dy.t().to(total.dtype), x.to(total.dtype))


@register_fake(add_weight_gradient)
def _(dy, x, total):
    return None


@register_flop_formula(torch.ops.nanomfu.add_weight_gradient)
def _(dy_shape, x_shape, total_shape, *args, **kwargs) -> int:
    return 2 * dy_shape[0] * dy_shape[1] * x_shape[1]


# --- inputs that the backward computes again: ops/recompute.py ---


class NormLinear(torch.autograd.Function):
    """x (..., C), the norm of total; weight (N, C) -> (..., N). The norm's own backward goes through x. The
    input is needed for the weight's gradient alone: so the backward computes the input's gradient first."""

    @staticmethod
    def forward(ctx, x, total, norm_weight, norm_bias, eps, centered, weight, bias, weight_grad):
        ctx.save_for_backward(total, norm_weight, norm_bias, weight)
        ctx.eps, ctx.centered, ctx.has_bias, ctx.weight_grad = eps, centered, bias is not None, weight_grad
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        total, norm_weight, norm_bias, weight = ctx.saved_tensors
        dx = dy @ weight
        x = norm_again(total, norm_weight, norm_bias, ctx.eps, ctx.centered)
        dweight = weight_gradient(dy, x, ctx.weight_grad)
        dbias = dy.flatten(0, -2).sum(0) if ctx.has_bias else None
        return dx, None, None, None, None, None, dweight, dbias, None


class _Gradients(LinearFunction):
    """LinearFunction's backward, without the product: what stands for it has its shape and no memory."""

    @staticmethod
    def forward(ctx, x, weight, total):
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return x.new_empty(()).expand(*x.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    """x (..., K), weight (N, K) -> (..., N), whose gradient goes to what stands for it."""

    @staticmethod
    def forward(ctx, stand_in, x, weight):
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None
