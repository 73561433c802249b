"""Adds up an iteration to its wall clock: each moment belongs to exactly one piece of work, or to a gap.

Where several kernels run at a moment, it belongs to a computing kernel before a copy, and to a copy before
communication: so communication has only what nothing hides. Among equals it belongs to the one that began
first. A moment in which nothing runs is a gap, which belongs to a cause.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tools.profile.trace import Work

LAUNCH, DATA, BETWEEN = "launch-bound", "waiting for data", "between kernels already launched"
NO_CAUSE = "idle, cause unknown"  # the trace does not say when the next kernel was launched
IDLE = (LAUNCH, DATA, BETWEEN, NO_CAUSE)
COMPUTE, COPY, COMMUNICATION = 0, 1, 2  # in the order in which a moment is given
Span = tuple[float, float]


@dataclass
class Timeline:
    """Microseconds of an iteration, or of several together."""

    wall: float = 0.0
    own: dict[int, float] = field(default_factory=dict)  # {index of a piece of work: its moments}
    idle: dict[str, float] = field(default_factory=lambda: dict.fromkeys(IDLE, 0.0))

    @property
    def total(self) -> float:
        return sum(self.own.values()) + sum(self.idle.values())


def add_up(
    work: Sequence[Work],
    begin: float,
    end: float,
    level: Callable[[int], int],
    data_waits: Sequence[Span] = (),
    end_launched: float | None = None,
) -> Timeline:
    """The timeline from `begin` to `end`. level(index) says whether a piece of work computes, copies or
    communicates. `data_waits` are the host's, sorted, and at `end_launched` it launched what ends it."""
    line = Timeline(end - begin)
    for start, stop, index in _moments(work, begin, end, level):
        if index is None:
            following = next_work(work, stop)
            launched = end_launched if stop == end or following is None else following.launched
            _add_gap(line, start, stop, launched, data_waits)
        else:
            line.own[index] = line.own.get(index, 0.0) + stop - start
    return line


def _moments(
    work: Sequence[Work], begin: float, end: float, level: Callable[[int], int]
) -> Iterator[tuple[float, float, int | None]]:
    """(start, stop, index of the work that this time belongs to, or None), without a hole."""
    events = sorted(range(len(work)), key=lambda index: work[index].start)
    running: list[tuple[int, float, int]] = []  # a heap of (level, start, index)
    now, position = begin, 0
    while now < end:
        while position < len(events) and work[events[position]].start <= now:
            index = events[position]
            heapq.heappush(running, (level(index), work[index].start, index))
            position += 1
        while running and work[running[0][2]].end <= now:
            heapq.heappop(running)
        following = work[events[position]].start if position < len(events) else end
        if running:
            index = running[0][2]
            stop = min(work[index].end, following, end)
            yield now, stop, index
        else:
            stop = min(following, end)
            yield now, stop, None
        now = stop


def _add_gap(
    line: Timeline, start: float, stop: float, launched: float | None, waits: Sequence[Span]
) -> None:
    """Gives a gap to its cause. If the host launched the next kernel only after the gap had begun, the device
    waited for the host; if the host was then waiting for a batch, for the data. A CUDA graph launches all of
    its kernels together."""
    if launched is None:
        line.idle[NO_CAUSE] += stop - start
        return
    if launched <= start:
        line.idle[BETWEEN] += stop - start
        return
    in_data = sum(max(0.0, min(stop, wait_end) - max(start, wait_start)) for wait_start, wait_end in waits)
    line.idle[DATA] += in_data
    line.idle[LAUNCH] += stop - start - in_data


def next_work(work: Sequence[Work], moment: float) -> Work | None:
    """The first that starts at or after the moment. `work` is sorted by start."""
    place = bisect_left(work, moment, key=lambda each: each.start)
    return work[place] if place < len(work) else None


def overlapped(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """How much of the union of `spans` is covered by the union of `others`."""
    total, position = 0.0, 0
    covering = union(others)
    for start, stop in union(spans):
        while position < len(covering) and covering[position][1] <= start:
            position += 1
        for other_start, other_stop in covering[position:]:
            if other_start >= stop:
                break
            total += min(stop, other_stop) - max(start, other_start)
    return total


def union(spans: Sequence[Span]) -> list[Span]:
    """The same time without overlaps, in order."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged
