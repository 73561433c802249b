"""Measures the seconds that training takes: evaluation, checkpoints and other pauses are left out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Lap(NamedTuple):
    """The time between two log rows, without the pauses."""

    seconds: float
    intervals: list[tuple[float, float]]  # when these seconds were, by time.perf_counter()


class Clock:
    """lap() gives the time since the last lap, without the pauses in between."""

    def __init__(self, device: torch.device):
        self.device = device
        self.intervals: list[tuple[float, float]] = []  # those since the last lap that a pause has ended
        self.depth = 0  # of pauses within pauses
        self.began = time.perf_counter()  # the interval that now runs

    def lap(self) -> Lap:
        now = time.perf_counter()
        intervals = [*self.intervals, (self.began, now)]
        self.intervals, self.began = [], now
        return Lap(sum(end - begin for begin, end in intervals), intervals)

    def since_lap(self) -> float:
        """Seconds since the last lap. Within a pause."""
        return sum(end - begin for begin, end in self.intervals)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wraps work that is no iteration. The device is synchronized at both ends, so that neither training
        that is still running nor the pause's own work is counted wrongly: also for work of the host alone,
        beside which a GPU may have iterations to compute. A pause within a pause changes nothing."""
        self._synchronize()
        if self.depth == 0:
            self.intervals.append((self.began, time.perf_counter()))
        self.depth += 1
        try:
            yield
            self._synchronize()
        finally:
            self.depth -= 1
            if self.depth == 0:
                self.began = time.perf_counter()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # sync point
