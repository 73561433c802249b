"""Output projection and loss in one: the logits, the largest tensor of a step, exist once and for a moment.

N tokens · C width · V vocabulary
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from common.errors import UserError
from ops.linear import Linear
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
    (weight, *_), gradient = lm_head.operands(x.dtype), torch.is_grad_enabled()
    parts = x.flatten(0, 1), weight, targets.flatten()
    return LinearCrossEntropy.apply(*parts, lm_head, chunks, gradient, gradient_scale)


MULTIPLE = (
    "the model's loss is a multiple of linear_cross_entropy(..., gradient_scale), which sums its weight "
    "gradient before the factor is known; leave out the argument gradient_scale, and any multiple is right"
)


class LinearCrossEntropy(torch.autograd.Function):
    """x (N, C), weight (V, C), targets (N,) -> mean cross-entropy of the logits x weight^T over the targets
    that are not negative, a scalar in fp32; 0 if there are none. The weight's gradient is added to the
    layer's weight_grad, if there is one. How the layer multiplies is its own (Linear.loss_part).

    The forward also makes the gradients, while the logits are there: they are overwritten by their own
    gradient and freed, `chunks` parts of the tokens one after another, so the largest tensor of a step exists
    once, for a moment (as in Liger-Kernel, Hsu et al. 2024, sec. 3.2). With a `known` GradientScale, the
    matmul adds the weight's gradient to the sum itself. Otherwise the backward scales what is there and adds
    it. So it does in float16, where small numbers would be lost, and with operands that a scale would round.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, layer: Linear, chunks, gradient, known):
        counted = (targets >= 0).sum().clamp(min=1)  # without any target, the sums are 0, and so is the mean
        total = layer.weight_grad
        if total is None or not layer.can_scale_sum(x.dtype):
            known = None
        scale = None if known is None else known.value / counted
        dweight = None
        if gradient:
            dweight = total if known is not None else torch.zeros_like(weight, dtype=torch.float32)
        pairs = zip(x.chunk(chunks), targets.chunk(chunks), strict=True)
        parts = [layer.loss_part(*pair, weight, dweight, scale) for pair in pairs]
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
            return dx, (dweight * factor).to(ctx.dtype), None, None, None, None, None
        if dweight is not None:
            ctx.total.addcmul_(dweight, factor)
        return dx, None, None, None, None, None, None
