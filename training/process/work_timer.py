"""Measures how long this rank's own work takes in each iteration, and says which part of it is running.

Synchronous ranks all take equally long for an iteration, so its time does not show who is slow. What counts
is a rank's own work: from asking for the batch to the end of the last forward. Gradients travel only after
that, and FSDP's waits for the weights of other ranks are subtracted.

On a GPU the times are taken by events on the stream and read long after they have passed: nothing waits.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

UNMEASURED_ITERS = 5  # the first of a process, which compile: no statistic of times counts them
RECENT = 10  # iterations; seconds() is their median
UNREAD = 64  # iterations that a GPU may be behind the host

Moment = float | torch.cuda.Event


@dataclass
class Iteration:
    begin: Moment
    waits: list[list[Moment]] = field(default_factory=list)  # [begin, end] of each
    end: Moment | None = None
    waits_before_end: int = 0


class WorkTimer:
    """The loader, the step and FSDP call it where it stands. `enter_phase` hears 'batch', 'forward' and
    'backward' as they begin."""

    def __init__(self, on_gpu: bool, enter_phase: Callable[[str], None] = lambda phase: None):
        self.on_gpu, self.enter_phase = on_gpu, enter_phase
        self.current: Iteration | None = None
        self.unread: deque[Iteration] = deque(maxlen=UNREAD)  # a GPU may not have completed them
        self.recent: deque[float] = deque(maxlen=RECENT)  # seconds
        self.iterations = 0

    def begin_batch(self) -> None:
        if self.current and self.current.end is not None and self.iterations > UNMEASURED_ITERS:
            self.unread.append(self.current)
        self.iterations += 1
        self.current = Iteration(self._now())
        self.enter_phase("batch")

    def begin_forward(self) -> None:
        self.enter_phase("forward")

    def end_forward(self) -> None:
        """After the forward of each micro-step; the last one counts."""
        assert self.current, "begin_batch() comes first"
        self.current.end, self.current.waits_before_end = self._now(), len(self.current.waits)
        self.enter_phase("backward")  # and what follows: the update, the other micro-steps

    def begin_wait(self) -> None:
        if self.current:
            self.current.waits.append([self._now()])

    def end_wait(self) -> None:
        if self.current:
            self.current.waits[-1].append(self._now())

    def seconds(self) -> float:
        """The median of the iterations that were completed last; 0 before there are enough."""
        while self.unread and self._has_passed(self.unread[0].end):
            iteration = self.unread.popleft()
            waits = iteration.waits[: iteration.waits_before_end]  # those after it are an evaluation's
            waited = sum(self._between(*wait) for wait in waits)
            self.recent.append(self._between(iteration.begin, iteration.end) - waited)
        return statistics.median(self.recent) if len(self.recent) == RECENT else 0.0

    def _now(self) -> Moment:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _has_passed(self, moment: Moment | None) -> bool:
        return moment.query() if isinstance(moment, torch.cuda.Event) else True

    def _between(self, first, second) -> float:
        return first.elapsed_time(second) / 1000 if self.on_gpu else second - first
