"""The orthogonal factor of matrices, by a few matmuls: Polar Express (Amsel et al. 2025, arXiv 2505.16932).

X = U S V^T becomes nearly U V^T: each step applies an odd polynomial to all singular values, and its
coefficients are the best ones for the interval in which the step before has left them. After five, singular
values above 0.001 of the largest possible one are 0.86 to 1.14.

    step        G = X X^T; X <- a X + (b G + c G G) X
    Gram form   for X of N >= 2 M columns: two steps on the small G alone, with P = a I + b G + c G G,
                G <- P G P, and then X <- P' P X. Three quarters of the operations for N = 3 M

The Gram form trap: its errors grow with the number of steps on G, and in bf16 five of them diverge. So X is
multiplied and G computed anew after every second step, and the digits are float16's where bf16 comes in.

On a GPU, G and the other symmetric products are computed below the diagonal and mirrored
(ops/triton_kernels/symmetric.py). What a matrix becomes does not depend on those that are beside it.

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
GRAM_STEPS = 2  # on one G


def orthogonalize(
    matrices: list[torch.Tensor], coefficients: Coefficients = POLAR_EXPRESS, margin: float = MARGIN
) -> torch.Tensor:
    """B matrices (M, N) of one shape and dtype -> (B, M, N), their orthogonal factors: of the shorter side's
    vectors, nearly orthonormal. In the dtype of the matrices, but for the Gram form (above)."""
    tall = matrices[0].shape[0] > matrices[0].shape[1]
    # one reduction a matrix, so that the order of its additions does not depend on the others
    norms = torch.stack(torch._foreach_norm(matrices, 2, dtype=torch.float32))
    x = torch.stack([matrix.mT if tall else matrix for matrix in matrices])
    _, M, N = x.shape
    by_gram = N >= 2 * M
    dtype = torch.float16 if by_gram and x.dtype == torch.bfloat16 else x.dtype
    divisors = (norms * margin).clamp(min=LEAST_NORM)[:, None, None]
    y = torch.div(x, divisors, out=torch.empty_like(x, dtype=dtype))
    y = (_steps_on_gram if by_gram else _steps)(y, coefficients).to(x.dtype)
    return y.mT if tall else y


def _steps(x: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    for a, b, c in coefficients:
        gram = symmetric_product(x, x)
        x = torch.baddbmm(x, symmetric_product(gram, gram, c, gram, b), x, beta=a)
    return x


def _steps_on_gram(x: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    for first in range(0, len(coefficients), GRAM_STEPS):
        gram, product = symmetric_product(x, x), None
        some = coefficients[first : first + GRAM_STEPS]
        for i, (a, b, c) in enumerate(some):
            polynomial = symmetric_product(gram, gram, c, gram, b, diagonal=a)
            product = polynomial if product is None else symmetric_product(polynomial, product)
            if i < len(some) - 1:  # all of these are polynomials of one G, so their products are symmetric
                gram = symmetric_product(symmetric_product(polynomial, gram), polynomial)
        assert product is not None
        x = torch.bmm(product, x)
    return x


def symmetric_product(
    x: torch.Tensor,
    y: torch.Tensor,
    alpha: float = 1.0,
    add: torch.Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> torch.Tensor:
    """alpha x y^T + beta add + diagonal I, (B, M, M), for x and y (B, M, K) whose product is symmetric."""
    if x.is_cuda:
        from ops.triton_kernels.symmetric import triton_symmetric_product

        return triton_symmetric_product(x, y, alpha, add, beta, diagonal)
    if add is None:
        out = torch.bmm(x, y.mT) if alpha == 1 else torch.bmm(x, y.mT) * alpha
    else:
        out = torch.baddbmm(add, x, y.mT, beta=beta, alpha=alpha)
    if diagonal:
        out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


def nominal_flops(M: int, N: int, steps: int = len(POLAR_EXPRESS)) -> int:
    """Operations of `steps` plain steps on a matrix (M, N), without what symmetry and the Gram form save."""
    M, N = sorted((M, N))
    return steps * (4 * M * M * N + 2 * M**3)
