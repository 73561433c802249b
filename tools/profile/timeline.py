"""Adds up an iteration to its wall clock: each moment belongs to exactly one piece of work, or is idle.

Where several kernels run at a moment, it belongs to a computing kernel before a copy, and to a copy before
communication: so communication has only what nothing hides. Among equal kernels it belongs to the one that
began first, among the operators of a CPU to the innermost.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from tools.profile.trace import Work

COMPUTE, COPY, HIDDEN = 0, 1, 2  # in the order in which a moment is given


def add_up(
    work: Sequence[Work], begin: float, end: float, levels: Sequence[int]
) -> tuple[dict[int, float], float]:
    """({index of a piece of work: its microseconds}, those in which nothing runs) from `begin` to `end`. Work
    is sorted by start. levels: whether each computes, copies or communicates."""
    own: defaultdict[int, float] = defaultdict(float)
    idle = 0.0
    running: list[tuple[int, float, int]] = []  # a heap of (level, order, index)
    now, position = begin, 0
    while now < end:
        while position < len(work) and work[position].start <= now:
            order = work[position].start if work[position].device else -position
            heapq.heappush(running, (levels[position], order, position))
            position += 1
        while running and work[running[0][2]].end <= now:
            heapq.heappop(running)
        stop = min(work[position].start if position < len(work) else end, end)
        if running:
            index = running[0][2]
            stop = min(stop, work[index].end)
            own[index] += stop - now
        else:
            idle += stop - now
        now = stop
    return dict(own), idle
