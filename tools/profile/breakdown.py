"""The table of an iteration: sorts what a rank recorded into parts, which add up to the wall clock."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.json_file import read_json
from tools.profile.parts import (
    COMMUNICATION,
    GROUPS,
    IDLE,
    PROFILER,
    Linears,
    group_of,
    is_matmul,
    part_of,
)
from tools.profile.timeline import COMPUTE, COPY, HIDDEN, add_up
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

    def clock_ratio(self) -> float:
        """The window's length by the trace, divided by that of the host's own clock."""
        of_host = self.facts["windows"][TIMES]["seconds"]
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


def breakdown(rank: Rank, linears: Linears) -> dict[str, Any]:
    """Milliseconds of an iteration of one rank."""
    work, (begin, end, iterations) = rank.work, rank.measured
    parts = [part_of(each, linears) for each in work]
    levels = [level(each, part.name) for each, part in zip(work, parts, strict=True)]
    times, idle = add_up(work, begin, end, levels)
    own: defaultdict[str, float] = defaultdict(float, {IDLE: idle} if idle else {})
    flops: defaultdict[str, float] = defaultdict(float)
    calls = set()
    for index, time in times.items():
        part, place = parts[index], work[index].place
        own[part.name] += time
        call = (place and place.call, sum(mark <= work[index].start for mark in rank.recording.marks))
        if part.flops and call not in calls:  # once for all of its kernels
            calls.add(call)
            flops[part.name] += part.flops
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
    idle = next((row for row in found["parts"] if row["part"] == IDLE), None)
    taken = min(max(0.0, found["wall_ms"] - unprofiled_ms), idle["ms"] if idle else 0.0)
    if idle and taken:
        idle["ms"] -= taken
        found["parts"].append(idle | {"part": PROFILER, "group": group_of(PROFILER), "ms": taken})
        for row in found["parts"]:
            row["percent"] = 100 * row["ms"] / found["wall_ms"]


def level(work: Work, part: str) -> int:
    """Which work a moment belongs to, if several run."""
    if work.device and part.startswith(COMMUNICATION):
        return HIDDEN
    return COPY if work.name.startswith("Memcpy") and not is_matmul(part) else COMPUTE


def adds_up(found: dict[str, Any]) -> bool:
    """Whether the parts' sum is the wall clock, and the trace's wall clock the host's."""
    of_parts = abs(found["sum_ms"] / found["wall_ms"] - 1)
    return max(of_parts, abs(found["trace_over_host_clock"] - 1)) <= TOLERANCE
