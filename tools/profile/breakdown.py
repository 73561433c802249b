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
    COMMUNICATION,
    GROUPS,
    HOST,
    PROFILER,
    WAITING,
    Linears,
    Part,
    group_of,
    is_matmul,
    part_of,
)
from tools.profile.timeline import BETWEEN, COMPUTE, COPY, HIDDEN, LAUNCH, Span, add_up
from tools.profile.trace import Recording, Work, give_places, read_recording
from training.records.profiler import PLACES, TIMES, facts_path, trace_path

TOLERANCE = 0.01  # of the wall clock, between the trace and the host's clock


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
    times = read_recording(trace_path(out_dir, TIMES, rank))
    if len(times.marks) != iterations + 1:
        raise RunError(f"rank {rank} marked {len(times.marks)} moments; expected {iterations + 1}")
    if PLACES not in facts["windows"]:
        return Rank(times.work, times, facts)
    known = read_recording(trace_path(out_dir, PLACES, rank)).iteration(0)
    work = [each for i in range(iterations) for each in give_places(times.iteration(i), known)]
    return Rank(work, times, facts)


def split_waits(ranks: Sequence[Rank], linears: Linears) -> tuple[list[list[Work]], bool]:
    """(the work of each rank, with the part of each collective in which a rank waited for others as work of
    its own; whether that is known). A collective ends on all ranks together, so the rank that came last has
    the shortest one: no common clock is needed."""
    places: list[dict[str, list[int]]] = []
    for rank in ranks:
        places.append(defaultdict(list))
        for index, work in enumerate(rank.work):
            if (part := part_of(work, linears).name).startswith(COMMUNICATION):
                places[-1][part].append(index)
    counts = [{part: len(indices) for part, indices in of_rank.items()} for of_rank in places]
    found = [list(rank.work) for rank in ranks]
    if any(count != counts[0] for count in counts):
        return found, False
    for part in counts[0]:
        for indices in zip(*(of_rank[part] for of_rank in places), strict=True):
            works = [rank.work[index] for rank, index in zip(ranks, indices, strict=True)]
            shortest = min(work.end - work.start for work in works)
            for of_rank, index, work in zip(found, indices, works, strict=True):
                arrived = work.end - shortest
                if work.device and arrived > work.start:
                    of_rank[index] = replace(work, start=arrived)
                    of_rank.append(replace(work, name=WAITING, end=arrived, place=None))
    return [sorted(works, key=lambda work: work.start) for works in found], True


def breakdown(rank: Rank, work: Sequence[Work], linears: Linears) -> dict[str, Any]:
    """Milliseconds of an iteration of one rank. `work` is split_waits()'s."""
    begin, end, iterations = rank.measured
    parts = [Part(WAITING) if each.name == WAITING else part_of(each, linears) for each in work]
    levels = [level(each, part.name) for each, part in zip(work, parts, strict=True)]
    ended = next(reversed(rank.recording.marks_launched), None)
    times, idle = add_up(work, begin, end, levels, rank.data_waits(), ended)
    own: defaultdict[str, float] = defaultdict(float)
    flops: defaultdict[str, float] = defaultdict(float)
    calls = set()
    for index, time in times.items():
        part, place = parts[index], work[index].place
        own[part.name] += time
        call = (place and place.call, sum(mark <= work[index].start for mark in rank.recording.marks))
        if part.flops and call not in calls:  # once for all of its kernels
            calls.add(call)
            flops[part.name] += part.flops
    if not any(each.device for each in work):  # on a CPU, what is not inside an operator is Python
        own[HOST] += idle.pop(LAUNCH)
    own.update({name: time for name, time in idle.items() if time})
    shown = sum(time for part, time in own.items() if part.startswith(COMMUNICATION))
    communicated = sum(
        max(0.0, min(each.end, end) - max(each.start, begin))
        for each, part in zip(work, parts, strict=True)
        if part.name.startswith(COMMUNICATION)
    )
    to_ms = 1 / (1000 * iterations)
    rows = [
        {
            "part": part,
            "group": group_of(part),
            "ms": to_ms * own[part],
            "percent": 100 * own[part] / (end - begin),
            "tflops": flops[part] / own[part] / 1e6 if flops[part] else None,
        }
        for part in sorted(own, key=lambda part: (GROUPS.index(group_of(part)), -own[part]))
    ]
    return {
        "rank": rank.facts["rank"],
        "iterations": iterations,
        "wall_ms": to_ms * (end - begin),
        "sum_ms": to_ms * sum(own.values()),
        "parts": rows,
        "communication_hidden_ms": to_ms * (communicated - shown),
        "trace_over_host_clock": rank.clock_ratio(),
    }


def split_profiler(found: dict[str, Any], unprofiled_ms: float) -> None:
    """Gives the profiler its own part: recording makes the host launch kernels later, so the GPU is idle for
    longer. The kernels themselves take as long as without it. So what an iteration takes longer than without
    the profiler is no idle time of the training, as far as there is idle time."""
    excess = taken = max(0.0, found["wall_ms"] - unprofiled_ms)
    for row in found["parts"]:
        if row["part"] in (LAUNCH, BETWEEN):
            moved = min(excess, row["ms"])
            row["ms"] -= moved
            excess -= moved
    if taken > excess:
        found["parts"].append({"part": PROFILER, "group": group_of(PROFILER), "ms": taken - excess})
        found["parts"][-1] |= {"percent": None, "tflops": None}
    for row in found["parts"]:
        row["percent"] = 100 * row["ms"] / found["wall_ms"]


def level(work: Work, part: str) -> int:
    """Which work a moment belongs to, if several run."""
    if work.device and (part == WAITING or part.startswith(COMMUNICATION)):
        return HIDDEN
    return COPY if work.name.startswith("Memcpy") and not is_matmul(part) else COMPUTE


def adds_up(found: dict[str, Any]) -> bool:
    """Whether the parts' sum is the wall clock, and the trace's wall clock the host's."""
    of_parts = abs(found["sum_ms"] / found["wall_ms"] - 1)
    return max(of_parts, abs(found["trace_over_host_clock"] - 1)) <= TOLERANCE
