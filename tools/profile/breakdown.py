"""The table of an iteration: each moment of the wall clock belongs to one part, or is idle."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.json_file import read_json
from tools.profile.parts import COMMUNICATION, GROUPS, IDLE, PROFILER, Part, Parts
from tools.profile.trace import Work, read_trace
from training.records.profiler import PLACES, TIMES, facts_path, trace_path

TOLERANCE = 0.01  # of the wall clock, between the trace and the host's clock
COMPUTE, COPY, HIDDEN = 0, 1, 2  # in the order in which a moment is given


def read_recording(out_dir: Path, model: Parts) -> tuple[list[Work], list[float], float, dict[str, Any]]:
    """What rank 0 recorded of the iterations that count: (work by start; the start of each and the end of the
    last, in microseconds; the wall clock of all that were recorded, as a share of the host's; what
    training/records/profiler.py says of the device). Raises RunError if nothing can be read."""
    try:
        facts = read_json(facts_path(out_dir, 0))
        works, marks = read_trace(trace_path(out_dir, TIMES, 0), model)
        if PLACES in facts["windows"]:
            placed = read_trace(trace_path(out_dir, PLACES, 0), model)[0][0]
            works = [give_parts(work, placed) for work in works]
        over_host_clock = (marks[-1] - marks[0]) / (1e6 * facts["windows"][TIMES]["seconds"])
    except (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error) as error:
        raise RunError(f"no profile can be read in {out_dir}: {type(error).__name__}: {error}") from None
    first = 1 if len(works) > 1 else 0  # the first one begins with an idle device
    return list(itertools.chain(*works[first:])), marks[first:], over_host_clock, facts


def give_parts(works: Sequence[Work], placed: Sequence[Work]) -> list[Work]:
    """The kernels of an iteration, with the parts of another one that has operators: the k-th of a kind (name
    and grid) has that of the k-th there. Where their numbers differ, it is known only if all there are alike;
    else the kernel's name is all that tells."""
    known: defaultdict[tuple, list[Part]] = defaultdict(list)
    for work in placed:
        known[work.name, work.grid].append(work.part)
    counts = Counter((work.name, work.grid) for work in works)
    numbers: defaultdict[tuple, Iterator[int]] = defaultdict(itertools.count)
    found = []
    for work in works:
        parts = known[work.name, work.grid]
        if len(parts) == counts[work.name, work.grid]:
            work = work._replace(part=parts[next(numbers[work.name, work.grid])])
        elif len({*parts}) == 1:
            work = work._replace(part=parts[0])
        found.append(work)
    return found


def breakdown(
    works: Sequence[Work], marks: list[float], over_host_clock: float, unprofiled_ms: float | None = None
) -> dict[str, Any]:
    """Milliseconds of an iteration of a recording. unprofiled_ms: on a GPU without the profiler, which gets a
    part of its own: recording makes the host launch kernels later, so the GPU is idle for longer, but the
    kernels take as long as without it."""
    begin, end, iterations = marks[0], marks[-1], len(marks) - 1
    to_ms = 1 / (1000 * iterations)
    own: defaultdict[Part, float] = defaultdict(float)
    times, idle = add_up(works, begin, end)
    hidden = 0.0
    for work, time in zip(works, times, strict=True):
        own[work.part] += time
        if work.part.step == COMMUNICATION:
            hidden += min(work.end, end) - work.start - time
    if unprofiled_ms is not None:
        own[PROFILER] = min(max(0.0, end - begin - unprofiled_ms / to_ms), idle)
    own[IDLE] += idle - own[PROFILER]
    total = sum(own.values())
    rows = [
        {
            "part": part.name,
            "step": part.step,
            "ms": to_ms * time,
            "percent": 100 * time / (end - begin),
            "tflops": iterations * part.flops / time / 1e6 if part.flops else None,
        }
        for part, time in sorted(own.items(), key=lambda row: (GROUPS.index(row[0].step), -row[1]))
        if time
    ]
    return {
        "iterations": iterations,
        "wall_ms": to_ms * (end - begin),
        "sum_ms": to_ms * total,
        "parts": rows,
        "communication_hidden_ms": to_ms * hidden,
        "trace_over_host_clock": over_host_clock,
        "adds_up": max(abs(total / (end - begin) - 1), abs(over_host_clock - 1)) <= TOLERANCE,
    }


def add_up(works: Sequence[Work], begin: float, end: float) -> tuple[list[float], float]:
    """(microseconds of each piece of work, those in which nothing runs). Where several run, a moment belongs
    to what computes before a copy, and to a copy before communication, which so has only what nothing hides;
    among equal kernels to the one that began first, among operators of a CPU to the innermost."""
    own, idle = [0.0] * len(works), 0.0
    running: list[tuple[int, int, int]] = []  # a heap of (level, order, index)
    starts = [*(work.start for work in works), end]
    now, position = begin, 0
    while now < end:
        while starts[position] <= now:
            work = works[position]
            level = COPY if work.name.startswith("Memcpy") else COMPUTE
            level = HIDDEN if work.part.step == COMMUNICATION else level
            on_gpu = work.grid is not None  # a CPU's main thread does one thing at a time
            heapq.heappush(running, (level, position, position) if on_gpu else (COMPUTE, -position, position))
            position += 1
        while running and works[running[0][2]].end <= now:
            heapq.heappop(running)
        stop = starts[position]
        if running:
            index = running[0][2]
            stop = min(stop, works[index].end)
            own[index] += stop - now
        else:
            idle += stop - now
        now = stop
    return own, idle
