"""Compares matmuls of scaled blocks with the emulation, before a run on a GPU trusts them.

The emulation's kernels have the bits of plain arithmetic (ops/compare_casts.py). So the codes and scales of
every operand must stand for the emulation's numbers, all of them. The three products, as training asks torch
for them, must be those of the operands, element by element:

    |difference| <= 2^-8 |result| + 2^-10 sum |a b|        both summed in fp32

The first part allows for a result in bf16, the second one for another order of sums. nvfp4's global factors
multiply the sums here: the emulation, which rounds its operands with them to bf16, is farther off than this.

M tokens · N, K sides of a weight
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops.quantized_linear import Quantized, QuantizedLinear
from ops.recipes.block_scaled import numbers_and_factor

MOST_ROWS = 4096  # M, beyond which a matmul is the same once more
Kind = type[QuantizedLinear]


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
        ours, plain = (_operands(kind, x, dy, weight, key) for kind in (native, emulated))
        reason = next(_differences(native, ours, plain), None)
    except Exception as error:  # whatever fails here would fail in training
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return reason and f"{M:,} tokens, weight {N:,} x {K:,}: {reason}"


def _operands(kind: Kind, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, key: torch.Tensor) -> list:
    """The same, quantized as the class of Linear does it."""
    low = Quantized(kind, kind.empty_weight(weight), torch.float8_e4m3fn, None, key)
    kind.requantize([weight], [low])
    return [kind.quantize_input(x, None, low), kind.quantize_gradient(dy, None, low), low.weight]


def _differences(native: Kind, ours: list, plain: list) -> Iterator[str]:
    forms = []  # numbers along the summed dimension, and their factor: rows and columns of x, dy, the weight
    for name, operand, expected in zip(("x", "dy", "the weight"), ours, plain, strict=True):
        rows, columns = numbers_and_factor(*operand[::2]), numbers_and_factor(*operand[1::2])
        forms.append((rows, columns))
        for side, (numbers, factor), right in (
            ("rows", rows, expected.rows),
            ("columns", columns, expected.columns.t()),
        ):
            if different := int(((numbers.float() * factor).to(right.dtype) != right).sum()):
                yield f"the {side} of {name} have other numbers ({different:,} of {right.numel():,})"
    x, dy, weight = ours
    kept, dtype = native.kept(x, weight), torch.bfloat16
    total = torch.zeros(len(dy.columns), len(x.columns), device=x.rows.device)
    native.weight_gradient(dy, kept, dtype, total)
    for name, found, (a, a_factor), (b, b_factor) in (
        ("forward", native.product(x, weight, dtype), forms[0][0], forms[2][0]),
        ("input gradient", native.input_gradient(dy, kept, dtype), forms[1][0], forms[2][1]),
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
