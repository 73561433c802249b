"""Output projection and loss in one: the logits, the largest tensor of a step, exist once and for a moment.

N tokens · C width · V vocabulary
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.errors import UserError
from ops.custom_op import custom_op, register_fake
from ops.float8 import quantize, scale_of
from ops.linear import Linear, add_weight_gradient
from ops.quantized_linear import Operand, Quantized, matmul
from ops.ranges import ranged


class GradientScale(NamedTuple):
    """What the step multiplies a micro-batch's loss by before the backward: its share of the iteration, and
    the loss scale."""

    value: torch.Tensor  # () fp32
    checks: bool = False  # whether the backward may wait for the device once, to refuse another factor


@ranged("cross_entropy")
def linear_cross_entropy(
    x: torch.Tensor,
    lm_head: Linear,
    targets: torch.Tensor,
    chunks: int,
    gradient_scale: GradientScale | None = None,
) -> torch.Tensor:
    """x (B, T, C), targets (B, T) -> the mean loss of lm_head(x) over the targets that are not negative, 0 if
    there are none, without logits that outlive it. `chunks` parts of the tokens have their logits one after
    another.

    With gradient_scale, the weight's gradient, multiplied by it, is in lm_head.weight_grad when this returns.
    So this loss may be a term of a sum; but of a multiple of it all gradients are NaN, or `checks` refuses
    it. Without gradient_scale a multiple is right, too, and takes 4 bytes more for each weight of the head.
    """
    weight = lm_head.weight.to(x.dtype)
    x, targets = x.flatten(0, 1), targets.flatten()
    total, low, gradient = lm_head.weight_grad, lm_head.low_precision, torch.is_grad_enabled()
    return LinearCrossEntropy.apply(x, weight, targets, total, low, chunks, gradient, gradient_scale)


MULTIPLE = (
    "the model's loss is a multiple of linear_cross_entropy(..., gradient_scale), which sums its weight "
    "gradient before the factor is known; leave out the argument gradient_scale, and any multiple is right"
)


class LinearCrossEntropy(torch.autograd.Function):
    """x (N, C), weight (V, C), targets (N,) -> mean cross-entropy of the logits x weight^T over the targets
    that are not negative, a scalar in fp32; 0 if there are none. The weight's gradient is added to `total`,
    if there is one. With low, all three matmuls are in low precision.

    The forward also makes the gradients, while the logits are there: they are overwritten by their own
    gradient and freed, `chunks` parts of the tokens one after another, so the largest tensor of a step exists
    once, for a moment (as in Liger-Kernel, Hsu et al. 2024, sec. 3.2). With a `known` GradientScale, the
    matmul adds the weight's gradient to `total` itself. Otherwise the backward scales what is there and adds
    it. So it does in float16, where small numbers would be lost, and with emulated operands, which a scale
    would round.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, total, low: Quantized | None, chunks, gradient, known):
        counted = (targets >= 0).sum().clamp(min=1)  # without any target, the sums are 0, and so is the mean
        exact = x.dtype != torch.float16 if low is None else low.kind.one_scale
        if total is None or not exact:
            known = None
        scale = None if known is None else known.value / counted
        dweight = None
        if gradient:
            dweight = total if known is not None else torch.zeros_like(weight, dtype=torch.float32)
        sums = dweight, scale
        pairs = zip(x.chunk(chunks), targets.chunk(chunks), strict=True)
        if low is None:
            parts = [_loss(*pair, weight, *sums) for pair in pairs]
        else:
            parts = [_low_precision_loss(*pair, low, *sums) for pair in pairs]
        losses, dxs = zip(*parts, strict=True)
        if gradient:
            dx = torch.cat(dxs) if len(dxs) > 1 else dxs[0]
            ctx.save_for_backward(dx, dweight if known is None else None, counted)
            ctx.total, ctx.dtype, ctx.known = total, weight.dtype, known
        return sum(losses) / counted

    @staticmethod
    def backward(ctx, dloss):
        dx, dweight, counted = ctx.saved_tensors
        factor = dloss / counted
        if ctx.known is not None:
            # of a multiple of the loss, the sum that was made without the factor must not become an update
            is_known = dloss == ctx.known.value
            if ctx.known.checks and dloss.isfinite() and not is_known:  # sync point
                raise UserError(MULTIPLE)
            factor = torch.where(is_known, factor, math.nan)
        dx = (dx.float() * factor).to(dx.dtype)  # not dx * factor, which would round factor to dx's dtype
        if ctx.total is None:
            return dx, (dweight * factor).to(ctx.dtype), None, None, None, None, None, None
        if dweight is not None:
            ctx.total.addcmul_(dweight, factor)
        return dx, None, None, None, None, None, None, None


def _loss(x, targets, weight, dweight, scale):
    """Sum of the losses, and the gradient of x. Adds the weight's to dweight, if there is one, times scale,
    if there is one."""
    # scale is for x and not for the logits' gradient, which has many numbers just above -1: in bf16, all of
    # them times the same scale may be rounded in the same direction
    scaled = x if scale is None else (x.float() * scale).to(x.dtype)
    logits = F.linear(x, weight)  # (N, V)
    losses = cross_entropy(logits, targets, dweight is not None)
    if dweight is None:
        return losses.sum(), None
    add_weight_gradient(logits, scaled, dweight)  # by now, they are their gradient
    return losses.sum(), logits @ weight


def _low_precision_loss(x, targets, low: Quantized, dweight, scale):
    """_loss in low precision."""
    logits, kept = matmul(x, None, low)
    if dweight is None:
        return cross_entropy(logits, targets, gradient=False).sum(), None
    losses, d = low.kind.loss_and_gradient(logits, targets, low)
    del logits
    if scale is not None:
        kept = kept._replace(x_scale=kept.x_scale * scale)
    low.kind.weight_gradient(d, kept, x.dtype, dweight)
    return losses.sum(), low.kind.input_gradient(d, kept, x.dtype)


def cross_entropy_float8(
    logits: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, Operand]:
    """cross_entropy's losses, and its gradients in fp8. Overwrites the logits on a CPU."""
    amax = torch.ones((), device=logits.device)  # no probability is above 1
    if logits.is_cuda:
        scale = scale_of(amax, dtype)
        losses, values, transposed = _cross_entropy_float8(logits, targets, scale, dtype)
        return losses, Operand(values, transposed, scale.reciprocal())
    losses = cross_entropy(logits, targets, True)
    return losses, quantize(logits, dtype, amax)


@custom_op("nanomfu::cross_entropy_float8", mutates_args=())
def _cross_entropy_float8(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from ops.triton_kernels.cross_entropy import triton_cross_entropy_float8

    return triton_cross_entropy_float8(logits, targets, scale, dtype)


@register_fake(_cross_entropy_float8)
def _(logits, targets, scale, dtype):
    N, V = logits.shape
    losses = logits.new_empty(N, dtype=torch.float32)
    return losses, logits.new_empty(N, V, dtype=dtype), logits.new_empty(V, N, dtype=dtype)


@custom_op("nanomfu::cross_entropy", mutates_args=("logits",))
def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, gradient: bool) -> torch.Tensor:
    """Losses (N,) fp32, 0 for a negative target; with gradient=True the logits become their gradients."""
    if logits.is_cuda:
        from ops.triton_kernels.cross_entropy import triton_cross_entropy

        return triton_cross_entropy(logits, targets, gradient)
    wide = logits.float()
    log_sums = wide.logsumexp(-1)
    counted, column = targets >= 0, targets.clamp(min=0)[:, None]
    losses = (log_sums - wide.gather(-1, column).squeeze(-1)) * counted
    if gradient:
        gradients = (wide - log_sums[:, None]).exp()
        gradients.scatter_add_(-1, column, -torch.ones_like(column, dtype=gradients.dtype))
        logits.copy_(gradients * counted[:, None])
    return losses


@register_fake(cross_entropy)
def _(logits, targets, gradient):
    return logits.new_empty(targets.shape, dtype=torch.float32)
