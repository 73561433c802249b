"""Compares block-scaled matmuls with the emulation, before a run on a GPU trusts them.

The emulation's kernels have the bits of plain arithmetic (ops/compare_casts.py). So the codes and scales of
every operand must decode to the emulation's numbers, all of them. The three products, as training asks torch
for them, must be those of the operands, element by element:

    |difference| <= 2^-8 |result| + 2^-10 sum |a b|        both summed in fp32

The first part allows for a result in bf16, the second one for another order of sums. nvfp4's global factors
multiply the sums here: the emulation, which rounds its operands with them to bf16, is farther off than this.

M tokens · N, K sides of a weight
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops.quantized_linear import Operand, Quantized, QuantizedLinear
from ops.recipes.block_scaled import BlockOperand, decode, numbers_and_factor

OF_RESULT, OF_PRODUCTS = 2.0**-8, 2.0**-10
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
    try:
        matrices = _matrices(M, N, K, key.device)
        ours = _operands(native, *matrices, key)
        different = _different_numbers(ours, _operands(emulated, *matrices, key))
        reason = next(different, None) or next(_different_products(native, *ours), None)
    except Exception as error:  # whatever fails here would fail in training
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return reason and f"{M:,} tokens, weight {N:,} x {K:,}: {reason}"


def _matrices(M: int, N: int, K: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, dy and the weight."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own random numbers stay as they are
    x, dy, weight = (
        torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        for shape in ((M, K), (M, N), (N, K))
    )
    return x, dy * torch.logspace(-6, 0, N, device=device).to(dy.dtype), weight  # scales of many sizes


def _operands(kind: Kind, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, key: torch.Tensor) -> list:
    """Of the three, as the class of Linear makes them."""
    low = Quantized(kind, kind.empty_weight(weight), torch.float8_e4m3fn, None, key)
    kind.requantize([weight], [low])
    return [kind.quantize_input(x, None, low), kind.quantize_gradient(dy, None, low), low.weight]


def _different_numbers(ours: list[BlockOperand], plain: list[Operand]) -> Iterator[str]:
    for name, found, expected in zip(("x", "dy", "the weight"), ours, plain, strict=True):
        forms = {"rows": (decode(found.rows, found.scales), expected.rows)}
        forms["columns"] = decode(found.columns, found.column_scales).t(), expected.columns
        for form, (numbers, right) in forms.items():
            if different := int((numbers != right).sum()):
                yield f"the {form} of {name} have other numbers ({different:,} of {right.numel():,})"


def _different_products(native: Kind, x, dy, weight) -> Iterator[str]:
    kept, dtype = native.kept(x, weight), torch.bfloat16
    total = torch.zeros(len(dy.columns), len(x.columns), device=x.rows.device)
    native.weight_gradient(dy, kept, dtype, total)
    of_rows, of_columns = ([(one[i], one[i + 2]) for one in (x, dy, weight)] for i in (0, 1))
    products = {
        "forward": (native.product(x, weight, dtype), of_rows[0], of_rows[2]),
        "input gradient": (native.input_gradient(dy, kept, dtype), of_rows[1], of_columns[2]),
        "weight gradient": (total, of_columns[1], of_columns[0]),
    }
    for name, (found, *forms) in products.items():
        (a, a_factor), (b, b_factor) = (numbers_and_factor(*form) for form in forms)
        a, b = a.float(), b.float()
        factor = a_factor * b_factor
        result, magnitudes = (a @ b.t()) * factor, (a.abs() @ b.abs().t()) * factor
        allowed = OF_RESULT * result.abs() + OF_PRODUCTS * magnitudes
        beyond = (found.float() - result).abs() - allowed
        if not (beyond <= 0).all():
            at = beyond.nan_to_num(torch.inf).argmax()
            off, limit = (beyond + allowed).flatten()[at].item(), allowed.flatten()[at].item()
            yield f"{name} is off by {off:.3g}, where {limit:.3g} is allowed"
