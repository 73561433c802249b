"""The orthogonal factor of matrices, by a few matmuls: Polar Express (Amsel et al. 2025, arXiv 2505.16932).

X = U S V^T becomes nearly U V^T: each step applies an odd polynomial to all singular values, and its
coefficients are the best ones for the interval in which the step before has left them. After five, singular
values above 0.001 of the largest possible one are 0.86 to 1.14.

    plain       G = X X^T; X <- a X + (b G + c G G) X
    Gram form   for X of N >= 2 M columns: several steps on the small G alone, with P = a I + b G + c G G and
                G <- P G P, then X <- P'' P' P X. Two thirds of the operations for N = 3 M

If X is tall, G = X^T X, and X is multiplied from the right. The trap of the Gram form: its errors grow with
each step on one G, and the steps that follow enlarge a singular value above 2 without end. In gradients of a
new model one direction has 0.86 of the norm: after three steps on the first G it was 2.7, then infinite,
while those of random matrices stayed below 1.15. So G is computed anew after the second step, and has the
digits of float16 where X is bf16. The last three steps may leave singular values of up to 1.3.

On a GPU, G and the other symmetric products are computed below the diagonal and mirrored
(ops/triton_kernels/symmetric.py), and what a matrix becomes does not depend on those that are beside it.

B matrices · M rows · N columns
"""

from __future__ import annotations

import torch

Coefficients = tuple[tuple[float, float, float], ...]

# the paper's, for the interval [0.001, 1], as in its published code: with a cushion for bf16
POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
MARGIN = 1.02  # the norm is divided out with it, so that rounding leaves no singular value above 1
LEAST_NORM = 1e-7  # a matrix of zeros stays one
FIRST_STEPS = 2  # on the first G


def orthogonalize(
    matrices: list[torch.Tensor],
    coefficients: Coefficients = POLAR_EXPRESS,
    margin: float = MARGIN,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """B matrices (M, N) of one shape and dtype -> (B, M, N) in dtype (None: theirs): their orthogonal
    factors, whose rows, or columns if M > N, are nearly orthonormal."""
    # one reduction a matrix, so that the order of its additions does not depend on the others
    norms = torch.stack(torch._foreach_norm(matrices, 2, dtype=torch.float32))
    divisors = (norms * margin).clamp(min=LEAST_NORM)[:, None, None]
    x = matrices[0].new_empty(len(matrices), *matrices[0].shape, dtype=dtype)
    for matrix, divisor, to in zip(matrices, divisors, x, strict=True):
        torch.div(matrix, divisor, out=to)
    shorter, longer = sorted(matrices[0].shape)
    return (_steps_on_gram if longer >= 2 * shorter else _steps)(x, coefficients)


def _steps(x: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    for a, b, c in coefficients:
        gram = _gram(x, x.dtype)
        polynomial = symmetric_product(gram, gram, c, gram, b)
        x = torch.baddbmm(x, *_sides(polynomial, x), beta=a)
    return x


def _steps_on_gram(x: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    dtype = torch.float16 if x.dtype == torch.bfloat16 else x.dtype
    for some in (coefficients[:FIRST_STEPS], coefficients[FIRST_STEPS:]):
        gram, product = _gram(x, dtype), None
        for i, (a, b, c) in enumerate(some):
            polynomial = symmetric_product(gram, gram, c, gram, b, diagonal=a)
            product = polynomial if product is None else symmetric_product(polynomial, product)
            if i < len(some) - 1:  # all of these are polynomials of one G, so their products are symmetric
                gram = symmetric_product(symmetric_product(polynomial, gram), polynomial)
        assert product is not None
        x = torch.bmm(*_sides(product.to(x.dtype), x))
    return x


def _is_tall(x: torch.Tensor) -> bool:
    return x.shape[-2] > x.shape[-1]


def _gram(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The products of the shorter side's vectors."""
    vectors = x.mT if _is_tall(x) else x
    return symmetric_product(vectors, vectors, dtype=dtype)


def _sides(polynomial: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of x times a polynomial of its G."""
    return (x, polynomial) if _is_tall(x) else (polynomial, x)


def symmetric_product(
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float = 1.0,
    add: torch.Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """alpha x y^T + beta add + diagonal I, (B, M, M) in dtype (None: that of x). x and y are (B, M, K), and
    their product is symmetric."""
    dtype = dtype or x.dtype
    if x.is_cuda:
        from ops.triton_kernels.symmetric import triton_symmetric_product

        return triton_symmetric_product(x, y, alpha, add, beta, diagonal, dtype)
    if dtype != x.dtype:  # rounded once
        x, y = x.float(), y.float()
    out = torch.bmm(x, y.mT) if add is None else torch.baddbmm(add, x, y.mT, beta=beta, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out.to(dtype)


def nominal_flops(M: int, N: int, steps: int = len(POLAR_EXPRESS)) -> int:
    """Operations of plain steps on a matrix (M, N), without what symmetry and the Gram form save."""
    M, N = sorted((M, N))
    return steps * (4 * M * M * N + 2 * M**3)
