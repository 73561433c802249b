"""What a matmul in low precision takes; the product that makes a weight's gradient, or adds it to its sum.

M tokens · K, N widths
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula


class Operand(NamedTuple):
    """A matrix (M, N) for two matmuls. In fp8, columns is transposed, (N, M), contiguous, and either form
    times inverse_scale, () fp32, is about the matrix. Emulated: both forms are (M, N) in bf16."""

    rows: torch.Tensor  # for the product that sums over N
    columns: torch.Tensor  # for the product that sums over M
    inverse_scale: torch.Tensor = None  # type: ignore[assignment]  # emulated operands have none


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


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor | None:
    """dy (..., N), x (..., K) -> (N, K), or None, if it was added to total."""
    rows, x_rows = dy.flatten(0, -2), x.flatten(0, -2)
    if total is None:
        return rows.t() @ x_rows
    add_weight_gradient(rows, x_rows, total)
    return None
