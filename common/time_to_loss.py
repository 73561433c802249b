"""When a run reached a held-out loss, from its record alone: in tokens, seconds, FLOPs and GPU-hours.

Between two evaluations the loss is a straight line over iterations. Training time is that of iterations: no
evaluation and no checkpoint is in it, and the first row of an attempt, which compiles, counts as the next row
does. Wall-clock time is what has passed since the run began, also between its attempts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime

import numpy as np


@dataclass(frozen=True)
class Reached:
    """Where a loss was reached. What the record does not tell is None."""

    iteration: float
    tokens: float
    training_seconds: float
    wall_seconds: float | None
    flops: float | None  # of the model: tokens x FLOPs per token by the record's formula
    gpu_hours: float  # training_seconds x GPUs


class Progress:
    """Tokens and seconds of a record by its iterations. Raises ValueError if it has no rows."""

    def __init__(self, record: dict):
        rows = [row for row in record["training_iterations"] if _is_number(row.get("time_ms"))]
        if not rows:
            raise ValueError("the record has no row with a time")
        startup = record.get("startup_info") or {}
        self.flops_per_token = (startup.get("flops") or {}).get("flops_per_token")
        attempts = [row.get("attempt", 1) for row in rows]
        milliseconds = [row["time_ms"] for row in rows]
        for i in reversed(range(len(rows) - 1)):
            if attempts[i + 1] == attempts[i] and (i == 0 or attempts[i - 1] != attempts[i]):
                milliseconds[i] = milliseconds[i + 1]
        self.ends = np.array([0, *(row["iter"] + 1 for row in rows)], float)  # iterations done after each row
        lengths = np.diff(self.ends)
        seconds = lengths * np.array(milliseconds) / 1000
        gpus = [_gpus(row) for row in rows]
        self.seconds, self.gpu_seconds = (
            np.cumsum([0, *each]) for each in (seconds, seconds * np.array(gpus))
        )
        per_iter = startup.get("tokens_per_iter") or math.nan  # older rows do not say what they have seen
        ends = zip(rows, self.ends[1:], strict=True)
        self.tokens = np.array([0, *(row.get("tokens_seen", per_iter * end) for row, end in ends)], float)
        steps = [(step.get("iter"), step.get("val_loss"), step.get("time")) for step in record["eval_steps"]]
        self.evaluations = [step for step in steps if _is_number(step[0]) and _is_number(step[1])]
        began = [attempt.get("start_time") for attempt in record.get("attempts") or [record]]
        self.began = _time(began[0])

    def reached(self, loss: float) -> Reached | None:
        """Where the held-out loss first was this one or less; None if it never was. If it was so from the
        first evaluation on: where that was."""
        before: tuple | None = None
        for step in self.evaluations:
            iteration, value, time = step
            if value <= loss:
                share = 1.0 if before is None else (before[1] - loss) / (before[1] - value)
                last = step if before is None else before
                began, first, second = self.began, _time(last[2]), _time(time)
                wall = None
                if began and first and second:
                    wall = (first - began + share * (second - first)).total_seconds()
                return self._at(last[0] + share * (iteration - last[0]), wall)
            before = step
        return None

    def at_end(self) -> Reached:
        """The whole run."""
        last = self.evaluations[-1] if self.evaluations else None
        time = _time(last[2]) if last else None
        wall = (time - self.began).total_seconds() if time and self.began else None
        return self._at(self.ends[-1], wall)

    def _at(self, iteration: float, wall: float | None) -> Reached:
        tokens, seconds, gpu_seconds = (
            float(np.interp(iteration, self.ends, each))
            for each in (self.tokens, self.seconds, self.gpu_seconds)
        )
        flops = tokens * self.flops_per_token if self.flops_per_token else None
        return Reached(float(iteration), tokens, seconds, wall, flops, gpu_seconds / 3600)


def _gpus(row: dict) -> float:
    everywhere, each = row.get("tokens_per_sec"), row.get("tokens_per_sec_per_gpu")
    return everywhere / each if everywhere and each else 1.0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _time(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
