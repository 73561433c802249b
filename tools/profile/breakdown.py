"""The table of an iteration: sorts what the ranks recorded into parts, which add up to the wall clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.json_file import read_json
from tools.profile.parts import (
    GROUPS,
    HOST,
    LOST_MATMUL,
    PROFILER,
    UNKNOWN,
    WAITING,
    Classified,
    Classifier,
    group_of,
    is_communication,
    is_matmul,
)
from tools.profile.timeline import (
    BETWEEN,
    COMMUNICATION,
    COMPUTE,
    COPY,
    LAUNCH,
    Span,
    add_up,
    overlapped,
)
from tools.profile.trace import Recording, Work, give_places, read_events, recording
from training.records.profiler import PLACES, TIMES, facts_path, trace_path

TOLERANCE = 0.01  # of the wall clock, between the trace and the host's clock
WITHOUT_PLACE = (UNKNOWN, LOST_MATMUL)


@dataclass
class Rank:
    """What one rank recorded."""

    work: list[Work]  # of the window of times, with places, by start
    recording: Recording
    facts: dict[str, Any]

    @property
    def measured(self) -> tuple[float, float, int]:
        """(begin, end, iterations): without the first, which begins with an idle device."""
        marks = self.recording.marks
        first = 1 if len(marks) > 2 else 0
        return marks[first], marks[-1], len(marks) - 1 - first

    def data_waits(self) -> list[Span]:
        """When the host waited for batches: at the begin of each iteration."""
        launched, marks = self.recording.marks_launched, self.facts["windows"][TIMES]["marks"]
        if len(launched) != len(marks):
            return []
        waited = [later["waited_seconds"] - earlier["waited_seconds"] for earlier, later in pairwise(marks)]
        return [(start, start + 1e6 * seconds) for start, seconds in zip(launched, waited, strict=False)]

    def clock_ratio(self) -> float:
        """The window's length by the trace, divided by that of the host's own clock."""
        marks = self.facts["windows"][TIMES]["marks"]
        of_host = marks[-1]["seconds"] - marks[0]["seconds"]
        return (self.recording.marks[-1] - self.recording.marks[0]) / (1e6 * of_host)


def read_rank(out_dir: Path, rank: int) -> Rank:
    """Raises RunError if it recorded nothing that can be read."""
    try:
        facts = read_json(facts_path(out_dir, rank))
        iterations = len(facts["windows"][TIMES]["iterations"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunError(f"rank {rank} has left no profile in {out_dir}: {error}") from None
    times = recording(read_events(trace_path(out_dir, TIMES, rank)))
    if len(times.marks) != iterations + 1:
        raise RunError(f"rank {rank} marked {len(times.marks)} moments; expected {iterations + 1}")
    if PLACES not in facts["windows"]:
        return Rank(times.work, times, facts)
    known = recording(read_events(trace_path(out_dir, PLACES, rank))).iteration(0)
    work = [each for i in range(iterations) for each in give_places(times.iteration(i), known)]
    return Rank(work, times, facts)


def split_waits(ranks: Sequence[Rank], classify: Classifier) -> tuple[list[list[Work]], bool]:
    """(the work of each rank, with the part of each collective in which a rank waited for others as work of
    its own; whether that is known). A collective ends on all ranks together, so the rank that came last has
    the shortest one: no common clock is needed."""
    parts = [[classify(work).part for work in rank.work] for rank in ranks]
    places = [_collectives(names) for names in parts]
    if any(_lengths(of_rank) != _lengths(places[0]) for of_rank in places):
        return [rank.work for rank in ranks], False
    found = [list(rank.work) for rank in ranks]
    for kind, of_first in places[0].items():
        for number in range(len(of_first)):
            indices = [of_rank[kind][number] for of_rank in places]
            works = [rank.work[index] for rank, index in zip(ranks, indices, strict=True)]
            shortest = min(work.end - work.start for work in works)
            for of_rank, index, work in zip(found, indices, works, strict=True):
                arrived = work.end - shortest
                if work.device and arrived > work.start:
                    of_rank[index] = replace(work, start=arrived)
                    of_rank.append(replace(work, name=WAITING, end=arrived, place=None))
    return [sorted(works, key=lambda work: work.start) for works in found], True


def _collectives(parts: list[str]) -> dict[str, list[int]]:
    found = defaultdict(list)
    for index, part in enumerate(parts):
        if is_communication(part):
            found[part].append(index)
    return dict(found)


def _lengths(places: dict[str, list[int]]) -> dict[str, int]:
    return {kind: len(indices) for kind, indices in places.items()}


def breakdown(rank: Rank, work: Sequence[Work], classify: Classifier) -> dict[str, Any]:
    """Milliseconds of an iteration of one rank. `work` is split_waits()'s."""
    begin, end, iterations = rank.measured
    kinds = [Classified(WAITING, 0.0) if each.name == WAITING else classify(each) for each in work]
    line = add_up(
        work,
        begin,
        end,
        lambda index: level(work[index], kinds[index].part),
        rank.data_waits(),
        next(reversed(rank.recording.marks_launched), None),
    )
    own: defaultdict[str, float] = defaultdict(float)
    flops: defaultdict[str, float] = defaultdict(float)
    unknown: defaultdict[str, float] = defaultdict(float)
    calls = set()
    for index, time in line.own.items():
        part, count = kinds[index]
        own[part] += time
        place = work[index].place
        if count and place and (key := (place.call, _iteration(rank, work[index]))) not in calls:
            calls.add(key)
            flops[part] += count
        if part in WITHOUT_PLACE:
            where = f" in {place.path[-100:]}" if place else ""
            unknown[f"{work[index].name[:150]}{where}"] += time
    idle = {name: time for name, time in line.idle.items() if time}
    if not any(each.device for each in work):  # on a CPU, what is not inside an operator is Python
        own[HOST] += idle.pop(LAUNCH, 0.0)
    to_ms = 1 / (1000 * iterations)
    times = {**own, **idle}
    order = sorted(times, key=lambda part: (GROUPS.index(group_of(part)), -times[part]))
    rows = [
        {
            "part": part,
            "group": group_of(part),
            "ms": to_ms * times[part],
            "percent": 100 * times[part] / line.wall,
            "tflops": flops[part] / times[part] / 1e6 if flops[part] else None,
        }
        for part in order
    ]
    return {
        "rank": rank.facts["rank"],
        "iterations": iterations,
        "wall_ms": to_ms * line.wall,
        "sum_ms": to_ms * line.total,
        "parts": rows,
        "communication_hidden_ms": to_ms * hidden(work, kinds, begin, end),
        "unknown": {name: to_ms * unknown[name] for name in sorted(unknown, key=lambda name: -unknown[name])},
        "trace_over_host_clock": rank.clock_ratio(),
    }


def split_profiler(found: dict[str, Any], unprofiled_ms: float) -> None:
    """Gives the profiler its own part: recording makes the host launch kernels later, so the GPU is idle for
    longer. The kernels themselves take as long as without it. So what an iteration takes longer than without
    the profiler is no idle time of the training, as far as there is idle time."""
    excess = taken = max(0.0, found["wall_ms"] - unprofiled_ms)
    for row in found["parts"]:
        if row["part"] in (LAUNCH, BETWEEN) and excess > 0:
            part = min(excess, row["ms"])
            row["ms"] -= part
            excess -= part
    if taken > excess:
        found["parts"].append({"part": PROFILER, "group": group_of(PROFILER), "ms": taken - excess})
        found["parts"][-1] |= {"percent": None, "tflops": None}
    for row in found["parts"]:
        row["percent"] = 100 * row["ms"] / found["wall_ms"]


def _iteration(rank: Rank, work: Work) -> int:
    return sum(mark <= work.start for mark in rank.recording.marks)


def level(work: Work, part: str) -> int:
    """Which work a moment belongs to, if several run."""
    if part == WAITING or is_communication(part):
        return COMMUNICATION if work.device else COMPUTE
    return COPY if work.name.startswith("Memcpy") and not is_matmul(part) else COMPUTE


def hidden(work: Sequence[Work], kinds: Sequence[Classified], begin: float, end: float) -> float:
    """The time in which communication ran beside other work."""
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for each, kind in zip(work, kinds, strict=True):
        if each.device and kind.part != WAITING and each.end > begin and each.start < end:
            spans[is_communication(kind.part)].append((max(each.start, begin), min(each.end, end)))
    return overlapped(spans[True], spans[False])


def adds_up(found: dict[str, Any]) -> bool:
    """Whether the parts' sum is the wall clock, and the trace's wall clock the host's."""
    of_parts = abs(found["sum_ms"] / found["wall_ms"] - 1)
    return max(of_parts, abs(found["trace_over_host_clock"] - 1)) <= TOLERANCE
