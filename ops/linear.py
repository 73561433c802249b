"""A Linear that computes in its input's dtype, and may add its weight's gradient to a sum in fp32.

M tokens · C, N, K widths
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula

from ops.activation import Activation, Delta
from ops.custom_op import custom_op, register_fake
from ops.losses import cross_entropy
from ops.norm import norm_again


class Linear(nn.Linear):
    """A Linear that computes in its input's dtype, whatever its weight is stored in.

    weight_grad, if a strategy sets it, is the fp32 sum (out, in) that the backward adds the weight's gradient
    to; weight.grad then stays None. The next two are set by ops/recompute.py. Subclasses compute otherwise:
    project() and loss_part() are all that does.
    """

    weight_grad: torch.Tensor | None = None
    recomputes_input = False  # in the backward, if what came says how
    ends_recomputation = False  # this product is the last of what torch.utils.checkpoint() repeats
    keeps_input = True  # for the backward as it came, and not in a form of its own

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

    def loss_part(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor,
        dweight: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (N, C), targets (N,), the weight (V, C) in x's dtype -> the sum of the losses of the logits
        x weight^T, and its gradient for x. Adds that of the weight to dweight (V, C) fp32, times scale, if
        there is one; without dweight there are no gradients (ops/cross_entropy.py)."""
        # scale is for x and not for the logits' gradient, which has many numbers just above -1: in bf16, all
        # of them times the same scale may be rounded in the same direction
        scaled = x if scale is None else (x.float() * scale).to(x.dtype)
        logits = F.linear(x, weight)  # (N, V)
        losses = cross_entropy(logits, targets, dweight is not None)
        if dweight is None:
            return losses.sum(), None
        add_weight_gradient(logits, scaled, dweight)  # by now, they are their gradient
        return losses.sum(), logits @ weight

    def can_scale_sum(self, dtype: torch.dtype) -> bool:
        """Whether loss_part() takes a scale: its operands are then exact enough."""
        return dtype != torch.float16

    # --- what a subclass keeps of its weight ---

    def copies(self) -> dict[str, torch.Tensor]:
        """What refresh() makes of the weight, by name."""
        return {}

    @staticmethod
    def refresh(layers: Sequence[Linear]) -> None:
        """Writes the copies() of layers of this class anew, in place: captured code has their addresses."""


class InPlaceOf(Linear):
    """A Linear with the parameters of another one, whose place in the model it takes."""

    def __init__(self, layer: Linear):
        assert not layer.recomputes_input, "recompute() chooses by what a layer keeps: it comes later"
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias


@torch.no_grad()
def refresh_weights(model: nn.Module) -> None:
    """After an update, and after loading: whatever Linears keep of their weights is made anew."""
    layers: dict[type[Linear], list[Linear]] = {}
    for module in model.modules():
        if isinstance(module, Linear):
            layers.setdefault(type(module), []).append(module)
    for kind, of_kind in layers.items():
        kind.refresh(of_kind)


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
