"""Says in how much of the time and tokens of the baseline another side reaches the baseline's final held-out
loss.

For each run i of the baseline and each run j of the other side: the logarithm of what j needs to reach i's
last held-out loss over what i needed. The noise of both runs is in it, so the variance of the mean is that of
the row means over their number plus that of the column means over theirs, with the degrees of freedom of
Welch and Satterthwaite (Welch, Biometrika 34, 28, 1947). The trap: if one of the runs did not reach a loss,
there is no ratio, so where that is usual the ratios that there are come from lucky runs, and are too low.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from common.time_to_loss import Progress
from plots.run_record import Run, as_dict, tokenizers_differ
from plots.verdict import t_975

AMOUNTS = {"time": "training_seconds", "tokens": "tokens"}  # in a sentence, and of Reached
OF_WINDOWS = ("eval_iters", "block_size", "packing", "doc_masking")  # keys; and eval_batch_size
Side = dict[str, Progress]  # by the name of the run


class Ratio(NamedTuple):
    """What one side needs of what the other one needs; low and high, the interval, are None if a side has one
    run."""

    value: float
    low: float | None = None
    high: float | None = None

    def text(self, amount: str, kind: str = "") -> str:
        """'0.74 of the time (95 % interval 0.70 to 0.78)'"""
        if self.low is None or self.high is None:
            return f"{number(self.value)} of the {amount}"
        return f"{number(self.value)} of the {amount} ({kind}{number(self.low)} to {number(self.high)})"


def lines(sides: list[list[Run]], names: list[str]) -> list[str]:
    """Of each side against the first. None of a side whose held-out losses are not there, or of tokens of
    another tokenizer. names: of all runs, in their order."""
    rest = iter(names)
    named = [{next(rest): run for run in side} for side in sides]
    found = []
    for side in named[1:]:
        base, other = (
            {name: p for name, run in each.items() if (p := run.progress) and p.evaluations}
            for each in (named[0], side)
        )
        runs = [*named[0].values(), *side.values()]
        if len(base) + len(other) < len(runs) or tokenizers_differ(runs):
            continue
        if differ := other_windows(runs):
            what = f"{side_name(other)} against {side_name(base)}: no times to a loss are compared"
            found.append(f"{what}, as held-out losses are of other windows: {', '.join(differ)} differ")
            continue
        text, is_ratio = reaches(base, other)
        found += [text] if is_ratio else [text, f"  {reaches(other, base)[0]}"]
    return found


def side_name(side: Side) -> str:
    return re.sub(r"( seed )?\d+$", "", next(iter(side)))


def other_windows(runs: list[Run]) -> list[str]:
    """What differs of the windows that were evaluated, by what all of these records say. Which windows a seed
    chooses is noise between runs, as the rest of what a seed does."""
    data = [as_dict(run.startup.get("data")) for run in runs]
    of_val = "val_fingerprint" if all("val_fingerprint" in each for each in data) else "fingerprint"
    values = {
        "data": [each.get(of_val) for each in data],
        "eval_batch_size": [
            run.config.get("eval_batch_size") or run.config.get("batch_size") for run in runs
        ],
        **{name: [run.config.get(name) for run in runs] for name in OF_WINDOWS},
    }
    return [name for name, each in values.items() if None not in each and len({*map(str, each)}) > 1]


def reaches(base: Side, other: Side) -> tuple[str, bool]:
    """How `other` does with the final losses of `base`, and whether there is a ratio."""
    logs: dict[str, list] = {amount: [] for amount in AMOUNTS}
    for name, run in base.items():
        loss, last = run.evaluations[-1].loss, run.at_last_evaluation()
        final = f"the final loss of {name}, {loss:.4f}"
        if never := [each for each, run in other.items() if run.reached(loss) is None]:
            return f"{' and '.join(never)} did not reach {final}: no ratio", False
        if early := [each for each, run in other.items() if run.evaluations[0].loss < loss]:
            return f"{' and '.join(early)} had reached {final}, by the first evaluation: no ratio", False
        for amount, field in AMOUNTS.items():
            whole = getattr(last, field)
            needed = [(p.reached(loss), p.below_since(loss)) for p in other.values()]
            shares = [[log_share(getattr(at, field), whole) for at in each] for each in needed]
            logs[amount].append(shares)
    found = {amount: ratio(*np.moveaxis(np.array(each), 2, 0)) for amount, each in logs.items()}
    known = {amount: each for amount, each in found.items() if math.isfinite(each.value)}
    here, there = side_name(other), side_name(base)
    if not known:
        return f"{here} against {there}: the records do not tell what a loss took", False
    kinds = ["95 % interval ", ""]  # said once
    text = ", ".join(each.text(amount, kinds.pop(0)) for amount, each in known.items())
    alone = sum(len(side) == 1 for side in (base, other))
    without = ("", " (one run on a side, no interval)", " (one run a side, no interval)")[alone]
    return f"{here} reaches {there}'s final loss in {text}{without}", True


def log_share(part: float | None, whole: float | None) -> float:
    return math.log(part / whole) if part and whole and part / whole > 0 else math.nan


def ratio(first: np.ndarray, for_good: np.ndarray) -> Ratio:
    """Of logarithms, a row for each run of the baseline: by where a loss was first reached. Noise of single
    evaluations makes that too early, so the interval's upper end is as much higher as the places from which
    on the losses stayed below are later."""
    value = float(first.mean())
    if min(first.shape) < 2:
        return Ratio(exp(value))
    means = [first.mean(axis=1), first.mean(axis=0)]
    parts = [(float(each.var(ddof=1)) / len(each), len(each) - 1) for each in means]
    variance, squares = sum(part for part, _ in parts), sum(part**2 / freedom for part, freedom in parts)
    margin = t_975(max(variance**2 / squares, 1)) * math.sqrt(variance) if squares else 0.0
    later = float((for_good - first).mean())
    return Ratio(exp(value), exp(value - margin), exp(value + margin + later))


def exp(log: float) -> float:
    return math.exp(min(log, 700))  # a record from anybody may hold any numbers


def number(value: float) -> str:
    return f"{value:.2f}" if 0.095 <= value < 1000 else f"{value:.2g}"
