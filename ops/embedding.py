"""A lookup whose weight gradient is added to an fp32 sum in place.

N tokens · C width · V vocabulary
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops.custom_op import custom_op, register_fake
from ops.ranges import ranged


class Embedding(nn.Embedding):
    """A lookup; weight_grad as in ops/linear.py's Linear."""

    weight_grad: torch.Tensor | None = None

    @ranged("embedding")
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.weight_grad is None:
            return super().forward(ids)
        return EmbeddingFunction.apply(ids, self.weight, self.weight_grad)


class EmbeddingFunction(torch.autograd.Function):
    """ids (...), weight (V, C) -> weight[ids] (..., C). The backward adds the gradient to `total`."""

    @staticmethod
    def forward(ctx, ids, weight, total):
        ctx.save_for_backward(ids)
        ctx.total = total
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        add_embedding_gradient(ids.flatten(), dy.flatten(0, -2), ctx.total)
        return None, None, None


@custom_op("nanomfu::add_embedding_gradient", mutates_args=("total",))
def add_embedding_gradient(ids: torch.Tensor, dy: torch.Tensor, total: torch.Tensor) -> None:
    """total (V, C), row ids[n], += dy[n] (N, C). In a fixed order, unlike index_add_ on a GPU. In bf16, a row
    of total is rounded once."""
    if dy.is_cuda:
        from ops.triton_kernels.embedding import triton_add_embedding_gradient

        triton_add_embedding_gradient(ids, dy.contiguous(), total)
    elif total.dtype == torch.float32:
        total.index_add_(0, ids, dy.float())
    else:
        total.copy_(total.float().index_add_(0, ids, dy.float()))


@register_fake(add_embedding_gradient)
def _(ids, dy, total):
    return None
