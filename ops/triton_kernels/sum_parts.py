"""Adds up what the programs of a kernel found, each in its part of the rows.

P programs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS, ROWS = 32, 64  # 32 columns are a cache line


@triton.jit
def _sum_parts(
    parts, largest, sums, amax, P, n, LARGEST,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, AMAX: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        total += tl.load(parts + row * n + column, mask=(row < P) & (column < n), other=0.0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(sums + column, tl.sum(total, 0), mask=column < n)
    if AMAX:
        if tl.program_id(0) == 0:
            program = tl.arange(0, ALL)
            tl.store(amax, tl.max(tl.load(largest + program, mask=program < LARGEST, other=0.0), 0))


def sum_parts(parts: torch.Tensor, largest: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What each program has found, fp32: parts (P, ...) -> their sum (...), in a fixed order; and, if it is
    given, largest (L,) -> its maximum ()."""
    P, n, count = parts.shape[0], parts[0].numel(), 0 if largest is None else len(largest)
    sums, amax = parts.new_empty(parts.shape[1:]), parts.new_empty(())
    _sum_parts[(max(triton.cdiv(n, COLUMNS), 1),)](
        parts, parts if largest is None else largest, sums, amax, P, n, count,
        COLUMNS=COLUMNS, ROWS=ROWS, AMAX=largest is not None, ALL=triton.next_power_of_2(max(count, 1)),
        num_warps=4,
    )  # fmt: skip
    return sums, amax
