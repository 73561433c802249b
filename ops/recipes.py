"""The recipes of low precision: in which numbers, blocks and scales each operand of a Linear's matmuls is.

    forward         y  = x w^T     sums over the columns of x and of w
    input gradient  dx = dy w      sums over the columns of dy, the rows of w
    weight gradient dw = dy^T x    sums over the rows of dy, the rows of x

So x, w and dy each have two forms: `rows`, whose blocks lie along their rows, for a product that sums over
their columns; and `columns` for one that sums over their rows. Both are made from the bf16 matrix itself.
docs/low_precision.md explains each recipe. Sources: NVIDIA TransformerEngine 2.20, common/recipe/__init__.py;
Micikevicius et al. 2022 (fp8); OCP Microscaling v1.0 and arXiv 2506.08027
(MXFP8); arXiv 2509.25149 (NVFP4).
"""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 16  # torch's fp8 matmul wants both widths to be multiples of it


class Form(NamedTuple):
    """How one operand of one matmul is quantized."""

    element: str  # 'e4m3', 'e5m2', 'e2m1'
    block: tuple[int, int] | None  # rows x columns of the matrix that share a scale; None: all of it
    scale: str  # 'fp32', 'e8m0, rounded up', 'e4m3 times one fp32'
    stochastic: bool = False  # else to nearest, ties to even
    hadamard: bool = False  # after a Hadamard transform of 16 rows, which cancels in the product


class Recipe(NamedTuple):
    x_rows: Form
    x_columns: Form
    w_rows: Form
    w_columns: Form
    dy_rows: Form
    dy_columns: Form
    delayed: bool = False  # scales come from the amaxes of earlier micro-steps

    @property
    def alignment(self) -> int:
        """Numbers of rows and columns must be multiples of it: tokens and both widths."""
        forms = (form for form in self if isinstance(form, Form))
        return max([ALIGNMENT, *(max(form.block) for form in forms if form.block)])


def _tensorwise(delayed: bool = False) -> Recipe:
    forward, gradient = Form("e4m3", None, "fp32"), Form("e5m2", None, "fp32")
    return Recipe(forward, forward, forward, forward, gradient, gradient, delayed)


def _mxfp8() -> Recipe:
    rows, columns = (Form("e4m3", block, "e8m0, rounded up") for block in ((1, 32), (32, 1)))
    return Recipe(rows, columns, rows, columns, rows, columns)


def _nvfp4() -> Recipe:
    rows, columns, square = (
        Form("e2m1", block, "e4m3 times one fp32") for block in ((1, 16), (16, 1), (16, 16))
    )
    transformed = columns._replace(hadamard=True)
    return Recipe(
        x_rows=rows,
        x_columns=transformed,
        w_rows=square,
        w_columns=square,
        dy_rows=rows._replace(stochastic=True),
        dy_columns=transformed._replace(stochastic=True),
    )


RECIPES = {
    "fp8_tensorwise": _tensorwise(),
    "fp8_delayed": _tensorwise(delayed=True),
    "mxfp8": _mxfp8(),
    "nvfp4": _nvfp4(),
}
ONE_SCALE = tuple(  # one scale for a whole tensor: fp8_gradients chooses the gradients' numbers
    name for name, recipe in RECIPES.items() if recipe.x_rows.block is None
)
DELAYED = tuple(name for name, recipe in RECIPES.items() if recipe.delayed)
RANDOM = tuple(name for name, recipe in RECIPES.items() if recipe.dy_rows.stochastic)
