"""The random Hadamard transform that spreads outliers over 16 numbers before they are quantized to NVFP4.

    H = diag(signs) H16 / 4       orthogonal: (A H) (B H)^T = A B^T

Both operands of a weight's gradient are transformed along the tokens, which it sums over, so that the product
is that of the operands themselves. H16 is Sylvester's; the signs are TransformerEngine's fixed ones. Source:
"Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), sec. 4.

The 16 numbers of a tile are summed pair by pair, in four rounds, so that every device and every kernel gets
the same bits: a matmul sums in an order that is its own.

The result is rounded to bf16 before it is quantized. torch.compile leaves that rounding out where it can, and
then one in 170 NVFP4 codes is another: so the transform is an operation that it cannot see into.
"""

from __future__ import annotations

import torch

from ops.custom_op import custom_op, register_fake

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
NEGATIVE_ROWS = sum(1 << row for row, sign in enumerate(SIGNS) if sign < 0)


def random_hadamard(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x (M, K) in bf16, transformed in tiles of 16 along dim 0 or 1 -> (M, K) in bf16, from sums in fp32.
    ValueError: another type, or 16 does not divide the dimension."""
    if x.dtype != torch.bfloat16 or x.ndim != 2 or x.shape[dim] % SIZE:
        got = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"a bf16 matrix whose dimension {dim} is a multiple of {SIZE} is needed, not {got}")
    return _transform(x, dim)


@custom_op("nanomfu::random_hadamard", mutates_args=())
def _transform(x: torch.Tensor, dim: int) -> torch.Tensor:
    signs = torch.tensor(SIGNS, dtype=torch.float32, device=x.device) / SIZE**0.5
    tiles = x.float().movedim(dim, -1).unflatten(-1, (-1, SIZE)) * signs
    for distance in (1, 2, 4, 8):
        first, second = tiles.unflatten(-1, (-1, 2, distance)).unbind(-2)
        tiles = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return tiles.flatten(-2).movedim(-1, dim).to(x.dtype).contiguous()


@register_fake(_transform)
def _(x, dim):
    return x.new_empty(x.shape)
