"""Decides whether the tokens/s of two sides, each one run or several equal ones, really differ.

A row with a stall, which is much slower than the rest, counts as a slightly slow one: what is compared is
the usual speed, as in the medians of the record. Equal runs differ as wholes, by more than their rows
suggest. So the unit is the run: the noise of runs is pooled over both sides, and the 95 % interval of the
ratio is Student's with the degrees of freedom that this leaves (runs - 2). Where each side has one run there
are none: then RUN_NOISE is assumed, and the verdict says so. The rows give a least noise: neighboring rows
are not independent, as clock and temperature change slowly, so rows are joined to blocks until longer blocks
show no more noise (batch means: Flyvbjerg and Petersen, J. Chem. Phys. 91, 461, 1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import UserError

# Standard deviation of the tokens/s of equal runs on one machine, as a share, and its degrees of freedom.
# Repeated measurements on single H200s, hours apart, lie within 0.2 to 0.8 % of each other (LOG.md,
# 2026-11-21): 0.7 % between the extremes of five values is a standard deviation of 0.3 %. Ten equal runs in a
# row had 0.15 % (LOG.md, 2026-11-22).
RUN_NOISE, RUN_NOISE_FREEDOM = 0.003, 8
OUTLIER = 3.0  # standard deviations from the median from which a row counts as one at this distance
MIN_BLOCKS = 4  # fewer say too little about their own spread
MIN_ROWS = 4 * MIN_BLOCKS  # of a run that is alone, so that blocks of four rows are among those tried

# The 97.5 % point of Student's t by degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods,
# 1.3.6.7.2. Between two of them the smaller one counts, which gives a slightly wider interval.
T_975 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228), start=1))
T_975 |= dict(enumerate((2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086), start=11))
T_975 |= {25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980}


@dataclass(frozen=True)
class Verdict:
    """How much faster one side is than another, as shares: 0.01 is 1 % faster. The interval has 95 %."""

    change: float
    low: float
    high: float
    with_stalls: float  # the change of all tokens over all seconds, so with each stall in full
    noise_is_assumed: bool  # each side has one run, which cannot show by how much equal runs differ

    @property
    def is_difference(self) -> bool:
        return self.low > 0 or self.high < 0

    def text(self, name: str, other: str) -> str:
        """'B is 1.3 % faster than A, 95 % interval 0.9 to 1.7 %', of side `name` against `other`."""
        change, low, high = (100 * value for value in (self.change, self.low, self.high))
        assumed = ", noise assumed" * self.noise_is_assumed
        if not self.is_difference:
            interval = f"95 % interval {low:+.1f} to {high:+.1f} %{assumed}"
            return f"{name} is not distinguishable from {other}: {change:+.1f} %, {interval}"
        word = "faster" if change > 0 else "slower"
        near, far = sorted((abs(low), abs(high)))
        digits = 1 if near >= 0.05 else 2
        return (
            f"{name} is {abs(change):.{digits}f} % {word} than {other}, "
            f"95 % interval {near:.{digits}f} to {far:.{digits}f} %{assumed}"
        )


def compare(side: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Verdict:
    """How much faster `side` is than `other`. Each is a list of runs, and a run is the tokens/s of its rows.
    Raises UserError if there are too few rows."""
    for runs in (other, side):
        fewest, least_rows = min(map(len, runs)), MIN_ROWS if len(runs) == 1 else 1
        if fewest < least_rows:
            raise UserError(f"too few rows: {fewest}, at least {least_rows}")
    sides = [[usual(rows) for rows in runs] for runs in (other, side)]
    means = [np.array([rows.mean() for rows in logs]) for logs in sides]
    freedom, assumed = sum(map(len, means)) - 2, False
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in means)
    if not freedom:
        freedom, assumed = RUN_NOISE_FREEDOM, True
        squares = freedom * (RUN_NOISE**2 + np.mean([within_run(logs) for (logs,) in sides]))
    # not less than what the rows of these runs make likely: few runs may lie near each other by chance
    noise = [[within_run(rows) for rows in logs if len(rows) >= MIN_ROWS] for logs in sides]
    least = sum(float(np.mean(found or [0.0])) / len(logs) for found, logs in zip(noise, sides, strict=True))
    variance = max(squares / freedom * sum(1 / len(each) for each in means), least)
    difference = float(means[1].mean() - means[0].mean())
    margin = t_975(freedom) * math.sqrt(variance)
    # a record from anybody may hold numbers whose ratio is no float
    change, low, high = (math.expm1(min(difference + sign * margin, 700)) for sign in (0, -1, 1))
    stalls = np.mean([total(rows) for rows in side]) - np.mean([total(rows) for rows in other])
    return Verdict(change, low, high, math.expm1(min(stalls, 700)), assumed)


def total(rows: np.ndarray) -> float:
    """log(all tokens / all seconds) of rows with equal numbers of tokens."""
    return -math.log(float(np.mean(1 / rows)))


def usual(rows: np.ndarray) -> np.ndarray:
    """The logarithms of the rows, those far from the median moved to OUTLIER standard deviations from it."""
    logs = np.log(rows)
    median, reach = np.median(logs), OUTLIER * deviation(rows)
    return np.clip(logs, median - reach, median + reach) if reach else logs


def deviation(rows: np.ndarray) -> float:
    """The standard deviation of the rows, as a share, if they are normal but for a few far ones."""
    logs = np.log(rows)
    return 1.4826 * float(np.median(np.abs(logs - np.median(logs))))


def within_run(logs: np.ndarray) -> float:
    """The variance of the mean of these rows. They are joined to blocks of two, four and so on. The largest
    of these estimates counts, as blocks that still depend on each other give one that is too small."""
    found = []
    while len(logs) >= MIN_BLOCKS:
        found.append(float(logs.var(ddof=1)) / len(logs))
        even = logs[len(logs) % 2 :]  # without the first, which is nearest to the warm-up, if they are odd
        logs = even.reshape(-1, 2).mean(axis=1)
    return max(found)


def t_975(freedom: float) -> float:
    """The factor of a 95 % interval: by how many standard errors an estimate may be off."""
    return T_975[max(known for known in T_975 if known <= freedom)]
