"""Compares matmuls of scaled blocks with the emulation, before a run on a GPU trusts them.

The emulation's kernels have the bits of plain arithmetic (block_recipe.py). So the codes and scales of
every operand must stand for the emulation's numbers, all of them. The three products, as training asks torch
for them, must be those of the operands, element by element:

    |difference| <= 2^-8 |result| + 2^-10 sum |a b|        both summed in fp32

The first part allows for a result in bf16, the second one for another order of sums. nvfp4's global factors
multiply the sums here: the emulation, which rounds its operands with them to bf16, is farther off than this.

M tokens · N, K sides of a weight
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ops.linear import Linear
from recipes.block_linear import BlockLinear
from recipes.block_scaled import numbers_and_factor

MOST_ROWS = 4096  # M, beyond which a matmul is the same once more
Kind = type[BlockLinear]


@torch.no_grad()
def find_difference(
    native: Kind, emulated: Kind, sides: tuple[int, int], tokens: int, key: torch.Tensor
) -> str | None:
    """Why a layer whose weight is (N, K) must not compute as `native`: which operand or product differs, by
    how much, or what failed. None: it computes what the emulation does. tokens: of a micro-batch. key: of
    stochastic rounding, on the device. Sync point."""
    M, (N, K) = min(tokens, MOST_ROWS), sides
    if tokens % native.multiple:  # rows of x would be added, and none of dy
        return f"{tokens:,} tokens are no multiple of {native.multiple}"
    try:
        generator = torch.Generator(key.device).manual_seed(0)  # the run's own numbers stay as they are
        x, dy, weight = (
            torch.randn(shape, generator=generator, device=key.device).to(torch.bfloat16)
            for shape in ((M, K), (M, N), (N, K))
        )
        dy *= torch.logspace(-6, 0, N, device=key.device).to(dy.dtype)  # scales of many sizes
        ours, plain = (_layer(kind, weight, key) for kind in (native, emulated))
        reason = next(_differences(ours, plain, x, dy), None)
    except Exception as error:  # whatever fails here would fail in training
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return reason and f"{M:,} tokens, weight {N:,} x {K:,}: {reason}"


def _layer(kind: Kind, weight: torch.Tensor, key: torch.Tensor) -> BlockLinear:
    """A layer of this weight (N, K), quantized."""
    N, K = weight.shape
    plain = Linear(K, N, bias=False, device="meta")
    plain.weight = torch.nn.Parameter(weight)
    layer = kind(plain, key)
    kind.refresh([layer])
    return layer


def _differences(ours: BlockLinear, plain: BlockLinear, x: torch.Tensor, dy: torch.Tensor) -> Iterator[str]:
    forms = []  # numbers along the summed dimension, and their factor: rows and columns of x, dy, the weight
    operands: dict[str, Any] = {
        "x": ours.quantize(x),
        "dy": ours.quantize_gradient(dy),
        "the weight": ours.quantized,
    }
    expectations: Iterable[Any] = plain.quantize(x), plain.quantize_gradient(dy), plain.quantized
    for (name, operand), expected in zip(operands.items(), expectations, strict=True):
        rows, columns = numbers_and_factor(*operand[::2]), numbers_and_factor(*operand[1::2])
        forms.append((rows, columns))
        for side, (numbers, factor), right in (
            ("rows", rows, expected.rows),
            ("columns", columns, expected.columns.t()),
        ):
            if different := int(((numbers.float() * factor).to(right.dtype) != right).sum()):
                yield f"the {side} of {name} have other numbers ({different:,} of {right.numel():,})"
    low_x, low_dy, kept = operands["x"], operands["dy"], ours.kept(operands["x"])
    total = torch.zeros_like(ours.weight, dtype=torch.float32)
    ours.weight_gradient(low_dy, kept, x.dtype, total)
    for name, found, (a, a_factor), (b, b_factor) in (
        ("forward", ours.product(low_x, x.dtype), forms[0][0], forms[2][0]),
        ("input gradient", ours.input_gradient(low_dy, kept, x.dtype), forms[1][0], forms[2][1]),
        ("weight gradient", total, forms[1][1], forms[0][1]),
    ):
        a, b, factor = a.float(), b.float().t(), a_factor * b_factor
        result = (a @ b) * factor
        allowed = 2.0**-8 * result.abs() + 2.0**-10 * (a.abs() @ b.abs()) * factor
        beyond = (found.float() - result).abs() - allowed
        if not (beyond <= 0).all():
            at = beyond.nan_to_num(torch.inf).argmax()
            limit = allowed.flatten()[at].item()
            yield f"{name} is off by {beyond.flatten()[at].item() + limit:.3g}, {limit:.3g} is allowed"
