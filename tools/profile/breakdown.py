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
    MATMUL,
    OF_IDLE,
    OF_PROFILER,
    PROFILER,
    Linears,
    Part,
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


def breakdown(rank: Rank, linears: Linears, unprofiled_ms: float | None = None) -> dict[str, Any]:
    """Milliseconds of an iteration of one rank. unprofiled_ms: of an iteration on a GPU without the profiler.
    The profiler gets a part of its own: recording makes the host launch kernels later, so the GPU is idle for
    longer, but the kernels take as long as without it."""
    work, marks, (begin, end, iterations) = rank.work, rank.recording.marks, rank.measured
    parts = [part_of(each, linears) for each in work]
    times, idle = add_up(work, begin, end, [level(*pair) for pair in zip(work, parts, strict=True)])
    own: defaultdict[tuple[str, str], float] = defaultdict(float)  # by part and its group
    flops: defaultdict[str, float] = defaultdict(float)
    if idle:
        expected = end - begin if unprofiled_ms is None else 1000 * iterations * unprofiled_ms
        added = min(max(0.0, end - begin - expected), idle)
        own[IDLE, OF_IDLE] = idle - added
        if added:
            own[PROFILER, OF_PROFILER] = added
    calls = set()
    for index, time in times.items():
        part, place = parts[index], work[index].place
        own[part.name, part.group] += time
        call = (place and place.call, sum(mark <= work[index].start for mark in marks))
        if part.flops and call not in calls:  # once for all of its kernels
            calls.add(call)
            flops[part.name] += part.flops
    communicated = sum(
        max(0.0, min(each.end, end) - max(each.start, begin))
        for each, part in zip(work, parts, strict=True)
        if part.group == COMMUNICATION
    )
    shown = sum(time for (_, group), time in own.items() if group == COMMUNICATION)
    of_host = rank.facts["windows"][TIMES]["seconds"]
    to_ms = 1 / (1000 * iterations)
    rows = [
        {
            "part": name,
            "group": group,
            "ms": to_ms * time,
            "percent": 100 * time / (end - begin),
            "tflops": flops[name] / time / 1e6 if flops[name] else None,
        }
        for (name, group), time in sorted(own.items(), key=lambda row: (GROUPS.index(row[0][1]), -row[1]))
    ]
    return {
        "iterations": iterations,
        "wall_ms": to_ms * (end - begin),
        "sum_ms": to_ms * sum(own.values()),
        "parts": rows,
        "communication_hidden_ms": to_ms * (communicated - shown),
        "trace_over_host_clock": (marks[-1] - marks[0]) / (1e6 * of_host),
    }


def level(work: Work, part: Part) -> int:
    """Which work a moment belongs to, if several run."""
    if work.device and part.group == COMMUNICATION:
        return HIDDEN
    return COPY if work.name.startswith("Memcpy") and part.group != MATMUL else COMPUTE


def adds_up(found: dict[str, Any]) -> bool:
    """Whether the parts' sum is the wall clock, and the trace's wall clock the host's."""
    of_parts = abs(found["sum_ms"] / found["wall_ms"] - 1)
    return max(of_parts, abs(found["trace_over_host_clock"] - 1)) <= TOLERANCE
