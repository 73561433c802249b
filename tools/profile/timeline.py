"""Adds up an iteration to its wall clock: each moment belongs to exactly one piece of work, or to a gap.

Where several kernels run at a moment, it belongs to a computing kernel before a copy, and to a copy before
communication: so communication has only what nothing hides. Among equal kernels it belongs to the one that
began first, among the operators of a CPU to the innermost. A moment in which nothing runs is a gap, which
belongs to a cause.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from tools.profile.trace import Work

LAUNCH, DATA, BETWEEN = "launch-bound", "waiting for data", "between kernels already launched"
NO_CAUSE = "idle, cause unknown"  # the trace does not say when the next kernel was launched
IDLE = (LAUNCH, DATA, BETWEEN, NO_CAUSE)
COMPUTE, COPY, HIDDEN = 0, 1, 2  # in the order in which a moment is given
Span = tuple[float, float]


def add_up(
    work: Sequence[Work],
    begin: float,
    end: float,
    levels: Sequence[int],
    data_waits: Sequence[Span] = (),
    end_launched: float | None = None,
) -> tuple[dict[int, float], dict[str, float]]:
    """(microseconds of each piece of work by its index, those of each cause of a gap) from `begin` to `end`.
    Work is sorted by start. levels: whether each computes, copies or communicates. `data_waits` are the
    host's, and at `end_launched` it launched what ends the time."""
    own: dict[int, float] = {}
    idle = dict.fromkeys(IDLE, 0.0)
    for start, stop, index in _moments(work, begin, end, levels):
        if index is None:
            following = bisect_left(work, stop, key=lambda each: each.start)
            launched = work[following].launched if stop < end and following < len(work) else end_launched
            _add_gap(idle, start, stop, launched, data_waits)
        else:
            own[index] = own.get(index, 0.0) + stop - start
    return own, idle


def _moments(
    work: Sequence[Work], begin: float, end: float, levels: Sequence[int]
) -> Iterator[tuple[float, float, int | None]]:
    """(start, stop, index of the work that this time belongs to, or None), without a hole."""
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
        index = running[0][2] if running else None
        if index is not None:
            stop = min(stop, work[index].end)
        yield now, stop, index
        now = stop


def _add_gap(
    idle: dict[str, float], start: float, stop: float, launched: float | None, waits: Sequence[Span]
) -> None:
    """Gives a gap to its cause. If the host launched the next kernel only after the gap had begun, the device
    waited for the host; if the host was then waiting for a batch, for the data. A CUDA graph launches all of
    its kernels together."""
    if launched is None:
        idle[NO_CAUSE] += stop - start
    elif launched <= start:
        idle[BETWEEN] += stop - start
    else:
        in_data = sum(
            max(0.0, min(stop, wait_end) - max(start, wait_start)) for wait_start, wait_end in waits
        )
        idle[DATA] += in_data
        idle[LAUNCH] += stop - start - in_data
