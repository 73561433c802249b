"""Output projection and loss in one: the logits, the largest tensor of a step, exist once and for a moment.

N tokens · C width · V vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.library import custom_op

from ops.float8 import FORWARD, GRADIENT, Float8, matmul, quantize, scale_of
from ops.linear import Linear, add_weight_gradient


def linear_cross_entropy(
    x: torch.Tensor, lm_head: Linear, targets: torch.Tensor, chunks: int
) -> torch.Tensor:
    """x (B, T, C), targets (B, T) -> the mean loss of lm_head(x), without logits that outlive it. `chunks`
    parts of the tokens have their logits one after another."""
    weight = lm_head.weight.to(x.dtype)
    x, targets = x.flatten(0, 1), targets.flatten()
    total, float8, gradient = lm_head.weight_grad, lm_head.float8, torch.is_grad_enabled()
    return LinearCrossEntropy.apply(x, weight, targets, total, float8, chunks, gradient)


class LinearCrossEntropy(torch.autograd.Function):
    """x (N, C), weight (V, C), targets (N,) -> mean cross-entropy of the logits x weight^T over the targets
    that are not negative, a scalar in fp32. The weight's gradient is added to `total`, if there is one. With
    float8, the weight in fp8, all three matmuls are fp8.

    The forward also makes the gradients, while the logits are there: they are overwritten by their own
    gradient and freed, `chunks` parts of the tokens one after another, so the largest tensor of a step exists
    once, for a moment (as in Liger-Kernel, Hsu et al. 2024, sec. 3.2). The backward scales what is there.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, total, float8: Float8 | None, chunks: int, gradient: bool):
        part = _float8_loss if float8 else _loss
        dweight = torch.zeros_like(weight, dtype=torch.float32) if gradient else None
        parts = [
            part(x_part, float8 or weight, target_part, dweight)
            for x_part, target_part in zip(x.chunk(chunks), targets.chunk(chunks), strict=True)
        ]
        losses, dxs = zip(*parts, strict=True)
        counted = (targets >= 0).sum()
        if gradient:
            ctx.save_for_backward(torch.cat(dxs) if len(dxs) > 1 else dxs[0], dweight, counted)
            ctx.total, ctx.dtype = total, weight.dtype
        return sum(losses) / counted

    @staticmethod
    def backward(ctx, dloss):
        dx, dweight, counted = ctx.saved_tensors
        dloss = dloss / counted
        dx = (dx.float() * dloss).to(dx.dtype)  # not dx * dloss, which would round dloss to dx's dtype
        if ctx.total is None:
            return dx, (dweight * dloss).to(ctx.dtype), None, None, None, None, None
        ctx.total.addcmul_(dweight, dloss)
        return dx, None, None, None, None, None, None


def _loss(x, weight, targets, dweight):
    """Sum of the losses, and the gradient of x; adds the weight's to dweight, if there is one."""
    logits = F.linear(x, weight)  # (N, V)
    losses = cross_entropy(logits, targets, dweight is not None)
    if dweight is None:
        return losses.sum(), None
    add_weight_gradient(logits, x, dweight)  # by now, they are their gradient
    return losses.sum(), logits @ weight


def _float8_loss(x, weight: Float8, targets, dweight):
    """_loss with a weight in fp8."""
    x8 = quantize(x, FORWARD)
    logits = matmul(x8.values, weight.values, x8.inverse_scale, weight.inverse_scale, x.dtype, fast=True)
    if dweight is None:
        return cross_entropy(logits, targets, gradient=False).sum(), None
    losses, d8 = cross_entropy_float8(logits, targets)
    del logits
    dweight += matmul(d8.transposed, x8.transposed, d8.inverse_scale, x8.inverse_scale, torch.float32)
    return losses.sum(), matmul(d8.values, weight.transposed, d8.inverse_scale, weight.inverse_scale, x.dtype)


def cross_entropy_float8(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Float8]:
    """cross_entropy's losses, and its gradients in fp8. Overwrites the logits on a CPU."""
    amax = torch.ones((), device=logits.device)  # no probability is above 1
    if logits.is_cuda:
        scale = scale_of(amax, GRADIENT)
        losses, values, transposed = _cross_entropy_float8(logits, targets, scale)
        return losses, Float8(values, transposed, scale.reciprocal())
    losses = cross_entropy(logits, targets, True)
    return losses, quantize(logits, GRADIENT, amax)


@custom_op("nanomfu::cross_entropy_float8", mutates_args=())
def _cross_entropy_float8(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from ops.triton_kernels.cross_entropy import triton_cross_entropy_float8

    return triton_cross_entropy_float8(logits, targets, scale, GRADIENT)


@_cross_entropy_float8.register_fake
def _(logits, targets, scale):
    N, V = logits.shape
    losses = logits.new_empty(N, dtype=torch.float32)
    return losses, logits.new_empty(N, V, dtype=GRADIENT), logits.new_empty(V, N, dtype=GRADIENT)


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


@cross_entropy.register_fake
def _(logits, targets, gradient):
    return logits.new_empty(targets.shape, dtype=torch.float32)
