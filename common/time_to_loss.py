"""When a run reached a held-out loss, from its record alone: in tokens, seconds, FLOPs and GPU-hours.

Between two evaluations the loss is a straight line over iterations. Training time is that of iterations: no
evaluation and no checkpoint is in it, and the first row of an attempt, which compiles, counts as the next row
does. Wall-clock time is what has passed since the run began, also between its attempts.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

import numpy as np

from common import units
from common.arguments import target_losses


@dataclass(frozen=True)
class Reached:
    """Where a loss was reached. What the record does not tell is None."""

    iteration: float
    tokens: float | None
    training_seconds: float
    wall_seconds: float | None
    flops: float | None  # of the model: tokens x FLOPs per token by the record's formula
    gpu_hours: float  # training_seconds x GPUs

    @property
    def texts(self) -> dict[str, str]:
        """Each amount with its unit: {'training': '12.3 min', 'tokens': '161.8 M tokens', ...}."""
        return {
            "iteration": f"{self.iteration:,.1f}".removesuffix(".0"),
            "training": units.duration(self.training_seconds),
            "in all": "-" if self.wall_seconds is None else units.duration(self.wall_seconds),
            "tokens": "-" if self.tokens is None else units.tokens(self.tokens, decimals=1),
            "FLOPs": "-" if self.flops is None else f"{self.flops:.2g}".replace("e+", "e"),
            "GPU-hours": f"{self.gpu_hours:,.2f}" if self.gpu_hours >= 0.1 else f"{self.gpu_hours:.2g}",
        }

    def __str__(self) -> str:
        """'iteration 1,234.5: 12.3 min of training, 13.0 min in all, 161.8 M tokens, 2.6e17 FLOPs, ...'"""
        text = self.texts
        return (
            f"iteration {text['iteration']}: {text['training']} of training, {text['in all']} in all, "
            f"{text['tokens']}, {text['FLOPs']} FLOPs, {text['GPU-hours']} GPU-hours"
        )


class Evaluation(NamedTuple):
    iteration: float
    loss: float
    time: datetime | None


class Progress:
    """Tokens and seconds of a record by its iterations. Raises ValueError if it has no rows."""

    def __init__(self, record: dict):
        rows = [
            row
            for row in record["training_iterations"]
            if all(_is_number(row.get(k)) for k in ("iter", "time_ms"))
        ]
        if not rows:
            raise ValueError("the record has no row with a time")
        startup = record.get("startup_info") or {}
        flops = (startup.get("flops") or {}).get("flops_per_token")
        self.flops_per_token = flops if _is_number(flops) else None
        self.ends = np.array([0, *(row["iter"] + 1 for row in rows)], float)  # iterations done after each row
        seconds = np.diff(self.ends) * np.array(_milliseconds(rows)) / 1000
        gpus = [_gpus(row) for row in rows]
        self.seconds, self.gpu_seconds = (
            np.cumsum([0, *each]) for each in (seconds, seconds * np.array(gpus))
        )
        per_iter = startup.get("tokens_per_iter") or math.nan  # older rows do not say what they have seen
        seen = [row.get("tokens_seen") for row in rows]
        ends = zip(seen, self.ends[1:], strict=True)
        self.tokens = np.array([0, *(n if _is_number(n) else per_iter * end for n, end in ends)], float)
        self.evaluations = evaluations(record)
        self.began = _time((record.get("attempts") or [record])[0].get("start_time"))

    def reached(self, loss: float) -> Reached | None:
        """Where the held-out loss first was this one or less; None if it never was. If it was so from the
        first evaluation on: where that was."""
        places = (i for i, step in enumerate(self.evaluations) if step.loss <= loss)
        return None if (first := next(places, None)) is None else self._crossing(first, loss)

    def below_since(self, loss: float) -> Reached:
        """Since where the held-out loss never was more than this one; the last evaluation if it is."""
        above = [i for i, step in enumerate(self.evaluations) if step.loss > loss]
        first = above[-1] + 1 if above else 0
        return self.at_last_evaluation() if first == len(self.evaluations) else self._crossing(first, loss)

    def _crossing(self, place: int, loss: float) -> Reached:
        """On the line that ends in this evaluation, whose loss is not above this one."""
        step = self.evaluations[place]
        if place == 0:
            return self._at(step.iteration, self._wall(step))
        before = self.evaluations[place - 1]
        share = (before.loss - loss) / (before.loss - step.loss)
        start, end = self._wall(before), self._wall(step)
        wall = None if start is None or end is None else start + share * (end - start)
        return self._at(before.iteration + share * (step.iteration - before.iteration), wall)

    def at_last_evaluation(self) -> Reached:
        """Where the last held-out loss was measured, which there must be."""
        last = self.evaluations[-1]
        return self._at(last.iteration, self._wall(last))

    def seconds_at(self, iterations: np.ndarray) -> np.ndarray:
        """Of training, when so many iterations were done."""
        return self._along(iterations, self.seconds)

    def _at(self, iteration: float, wall: float | None) -> Reached:
        tokens, seconds, gpu_seconds = (
            float(self._along(np.array(iteration), each))
            for each in (self.tokens, self.seconds, self.gpu_seconds)
        )
        known = None if math.isnan(tokens) else tokens
        flops = known * self.flops_per_token if known is not None and self.flops_per_token else None
        return Reached(float(iteration), known, seconds, wall, flops, gpu_seconds / 3600)

    def _along(self, iterations: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        """Iterations after the last row are like those of that row: a run that was stopped has some."""
        beyond = np.maximum(iterations - self.ends[-1], 0)
        with np.errstate(invalid="ignore"):  # of infinite ones, in a record from anybody
            pace = (amounts[-1] - amounts[-2]) / max(self.ends[-1] - self.ends[-2], 1)
        return np.interp(iterations, self.ends, amounts) + beyond * pace

    def _wall(self, step: Evaluation) -> float | None:
        return (step.time - self.began).total_seconds() if step.time and self.began else None


def targets_reached(record: dict, losses: list[float]) -> list[tuple[float, Reached | None]]:
    """Each of these losses, and where it was reached; nowhere in a record without rows."""
    try:
        progress = Progress(record)
    except ValueError:
        return [(loss, None) for loss in losses]
    return [(loss, progress.reached(loss)) for loss in losses]


def describe_targets(record: dict) -> list[dict]:
    """The record's summary.loss_targets, by its key of that name."""
    found = targets_reached(record, target_losses(record["config"].get("loss_targets") or ""))
    return [{"loss": loss, **(dataclasses.asdict(at) if at else {"reached": None})} for loss, at in found]


def evaluations(record: dict) -> list[Evaluation]:
    """Those with a held-out loss, since losses are of what they are of now (training/evaluation.py,
    `measure`)."""
    changes = [e.get("attempt", 1) for e in record.get("events") or [] if e.get("kind") == "other_measure"]
    since = max(changes, default=1)
    return [
        Evaluation(step["iter"], step["val_loss"], _time(step.get("time")))
        for step in record.get("eval_steps") or []
        if _is_number(step.get("iter"))
        and _is_number(step.get("val_loss"))
        and step.get("attempt", 1) >= since
    ]


def _milliseconds(rows: list[dict]) -> list[float]:
    """An iteration's, of each row. The first row of an attempt counts as the next one; if there is none, as
    the last of the attempt before."""
    attempts, found = [row.get("attempt", 1) for row in rows], [row["time_ms"] for row in rows]
    for i, attempt in enumerate(attempts):
        if i and attempts[i - 1] == attempt:
            continue
        if attempts[i + 1 : i + 2] == [attempt]:
            found[i] = found[i + 1]
        elif i:
            found[i] = found[i - 1]
    return found


def _gpus(row: dict) -> float:
    """That made this row; a row of a record says it by its speeds."""
    if _is_number(row.get("gpus")):
        return float(row["gpus"])
    everywhere, each = row.get("tokens_per_sec"), row.get("tokens_per_sec_per_gpu")
    return everywhere / each if _is_number(everywhere) and _is_number(each) and each else 1.0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _time(text: object) -> datetime | None:
    """With its time zone: older records have none, which is this machine's then."""
    try:
        return datetime.fromisoformat(text).astimezone() if isinstance(text, str) else None
    except (ValueError, OverflowError, OSError):
        return None
