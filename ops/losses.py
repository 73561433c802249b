"""The loss of logits, and their gradient in place of them.

N tokens · V vocabulary
"""

from __future__ import annotations

import torch

from ops.custom_op import custom_op, register_fake
from ops.float8 import Operand, quantize, scale_of


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
