"""Fits the law's constants to runs, and says how far the runs determine them.

As approach 3 of Hoffmann et al. 2022 (section 3.3, appendix D.2), it minimizes the Huber loss (delta 1e-3)
between the logarithms of predicted and measured losses, from the best points of their grid of initial values.
They use L-BFGS; here a batch of Levenberg-Marquardt steps solves all initial values and all resamples at once
in numpy, so no other library is needed.

Runs of few sizes and token counts cannot determine five constants: then alpha and beta keep the values of
Hoffmann et al., and only E, A and B are fitted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from common.errors import UserError
from tools.plan.law import HOFFMANN, Law
from tools.plan.points import Point

DELTA = 1e-3
GRID = {  # initial values; A, B and E are exp(a), exp(b) and exp(e)
    "a": (0, 5, 10, 15, 20, 25),
    "b": (0, 5, 10, 15, 20, 25),
    "e": (-1, -0.5, 0, 0.5, 1),
    "alpha": (0, 0.5, 1, 1.5, 2),
    "beta": (0, 0.5, 1, 1.5, 2),
}
STARTS, STARTS_OF_A_RESAMPLE = 50, 2  # the best points of the grid
STEPS = 300
RESAMPLES = 200
INTERVAL = (5, 95)  # percentiles
SPARE = {5: 2, 3: 1}  # {constants: how many more runs are needed, so that resamples differ}
RANK_TOLERANCE = 1e-9
SMALLEST = np.array([-50.0, -50.0, -50.0, 0.0, 0.0])  # a, b, e, alpha, beta
LARGEST = np.array([50.0, 50.0, 50.0, 3.0, 3.0])

Array = np.ndarray


@dataclass(frozen=True)
class Fit:
    law: Law
    constants: int  # how many were fitted: 5, or E, A and B alone
    resampled: tuple[Law, ...]  # fits to runs drawn with replacement

    def interval(self, name: str) -> tuple[float, float]:
        """Of a constant, over the resamples."""
        return _percentiles([getattr(law, name) for law in self.resampled])

    def loss_interval(self, parameters: float, tokens: float) -> tuple[float, float]:
        return _percentiles([law.loss(parameters, tokens) for law in self.resampled])


def fit(points: list[Point], seed: int = 0) -> Fit:
    """Raises UserError if the runs are too few, or too much alike."""
    n, d = (np.log([getattr(point, name) for point in points]) for name in ("parameters", "tokens"))
    losses = np.log([point.loss for point in points])
    constants = determined(n, d)
    if not constants:
        sizes, tokens = len(set(n)), len(set(d))
        raise UserError(
            "--fit needs 4 runs or more, of 2 sizes and 2 numbers of tokens that do not rise together; got "
            f"{len(points)} runs of {sizes} sizes and {tokens} numbers of tokens"
        )
    free = np.array([True, True, True, constants == 5, constants == 5])
    problem = _Problem(n, d, losses, free)
    once = np.ones(len(points))
    starts = problem.best_starts(STARTS)
    solved, values = problem.solve(starts, np.tile(once, (len(starts), 1)))
    found = solved[np.argmin(values)]

    counts = _resamples(n, d, constants, np.random.default_rng(seed))
    few = np.vstack([found, starts[:STARTS_OF_A_RESAMPLE]])
    solved, values = problem.solve(np.tile(few, (len(counts), 1)), np.repeat(counts, len(few), axis=0))
    best = values.reshape(len(counts), len(few)).argmin(axis=1)
    laws = solved.reshape(len(counts), len(few), 5)[np.arange(len(counts)), best]
    return Fit(problem.law(found, points), constants, tuple(problem.law(each, points) for each in laws))


def determined(n: Array, d: Array) -> int:
    """How many constants the runs determine: 5, 3 or 0. On a grid of sizes and numbers of tokens, 5 need
    three of each: with two numbers of tokens, E, B and beta could not be told apart."""
    for constants, spare in SPARE.items():
        if len(n) >= constants + spare and _rank(_columns(n, d, constants)) == constants:
            return constants
    return 0


def _columns(n: Array, d: Array, constants: int) -> Array:
    """How each prediction depends on each constant, but for factors, at the exponents of Hoffmann et al."""
    n, d = n - n.mean(), d - d.mean()
    size, data = np.exp(-HOFFMANN.alpha * n), np.exp(-HOFFMANN.beta * d)
    return np.stack([np.ones(len(n)), size, data, size * n, data * d][:constants], axis=1)


def _rank(columns: Array) -> int:
    return int(np.linalg.matrix_rank(columns, tol=RANK_TOLERANCE))


def _resamples(n: Array, d: Array, constants: int, generator: np.random.Generator) -> Array:
    """How often each resample has each run. Those that cannot determine the constants are drawn again."""
    columns = _columns(n, d, constants)
    found: list[Array] = []
    while len(found) < RESAMPLES:
        times = generator.multinomial(len(n), np.full(len(n), 1 / len(n)))
        if _rank(columns[times > 0]) == constants:
            found.append(times)
    return np.array(found, dtype=float)


class _Problem:
    """Rows of theta are (a, b, e, alpha, beta), with ln N and ln D counted from their means: then the columns
    of the Jacobian depend less on each other."""

    def __init__(self, n: Array, d: Array, losses: Array, free: Array):
        self.n_mean, self.d_mean = n.mean(), d.mean()
        self.n, self.d = n - self.n_mean, d - self.d_mean
        self.losses, self.free = losses, free

    def terms(self, theta: Array) -> tuple[Array, Array]:
        """(ln L, shares of the three terms in L), of shapes (K, runs) and (3, K, runs)."""
        a, b, e, alpha, beta = (theta[:, i, None] for i in range(5))
        logs = np.stack([a - alpha * self.n, b - beta * self.d, e + 0 * self.n])
        top = logs.max(axis=0)
        shares = np.exp(logs - top)
        total = shares.sum(axis=0)
        return top + np.log(total), shares / total

    def value(self, theta: Array, counts: Array) -> Array:
        away = np.abs(self.terms(theta)[0] - self.losses)
        huber = np.where(away <= DELTA, away**2 / 2, DELTA * (away - DELTA / 2))
        return (counts * huber).sum(axis=1)

    def best_starts(self, most: int) -> Array:
        grid = dict(GRID)
        if not self.free[3]:
            grid |= {"alpha": (HOFFMANN.alpha,), "beta": (HOFFMANN.beta,)}
        theta = np.array(list(itertools.product(*grid.values())), dtype=float)
        theta[:, 0] -= theta[:, 3] * self.n_mean
        theta[:, 1] -= theta[:, 4] * self.d_mean
        values = self.value(theta, np.ones((len(theta), len(self.n))))
        return theta[np.argsort(values, kind="stable")[:most]]

    def solve(self, theta: Array, counts: Array) -> tuple[Array, Array]:
        """(theta, value) of each row after STEPS steps; a step that makes a row worse is not taken."""
        theta, damping = theta.copy(), np.full(len(theta), 1e-2)
        value = self.value(theta, counts)
        for _ in range(STEPS):
            logs, (in_a, in_b, in_e) = self.terms(theta)
            away = logs - self.losses
            jacobian = np.stack([in_a, in_b, in_e, -in_a * self.n, -in_b * self.d], axis=2) * self.free
            # weights that make the squares touch the Huber loss from above
            weights = counts * np.minimum(1.0, DELTA / np.maximum(np.abs(away), 1e-300))
            weighted = jacobian * weights[:, :, None]
            hessian = np.swapaxes(weighted, 1, 2) @ jacobian
            gradient = (weighted * away[:, :, None]).sum(axis=1)
            diagonal = np.einsum("kii->ki", hessian)
            added = damping[:, None] * diagonal + 1e-15 + ~self.free
            step = np.linalg.solve(hessian + added[:, :, None] * np.eye(5), gradient[:, :, None])[:, :, 0]
            tried = np.clip(theta - np.clip(step, -2, 2), SMALLEST, LARGEST)
            tried[:, ~self.free] = theta[:, ~self.free]
            new = self.value(tried, counts)
            better = new < value
            theta, value = np.where(better[:, None], tried, theta), np.where(better, new, value)
            damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-9, 1e9)
        return theta, value

    def law(self, theta: Array, points: list[Point]) -> Law:
        a, b, e, alpha, beta = (float(value) for value in theta)
        sizes, tokens = ([getattr(point, name) for point in points] for name in ("parameters", "tokens"))
        return Law(
            E=float(np.exp(e)),
            A=float(np.exp(a + alpha * self.n_mean)),
            B=float(np.exp(b + beta * self.d_mean)),
            alpha=alpha,
            beta=beta,
            source=f"fitted to {len(points)} runs",
            caveats=(f"fitted to the data and tokenizer of {points[0].data}: it says nothing about others",),
            parameters=(min(sizes), max(sizes)),
            tokens=(min(tokens), max(tokens)),
        )


def _percentiles(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, INTERVAL)
    return float(low), float(high)
