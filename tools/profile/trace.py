"""Reads a trace of torch.profiler as pieces of work, each with the place in the code that it belongs to:
kernels on a GPU, operators on a CPU.

A GPU's kernel belongs to the operator that was running on the host when the kernel was launched. On a CPU an
operator's own time is what remains of it without the operators inside it.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import RunError

Event = dict[str, Any]  # of the Chrome trace
Shape = tuple[int, ...]

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation")
LAUNCH = ("cuda_runtime", "cuda_driver")
GPU_MARK = "spin_kernel"  # training/records/profiler.py launches it before each iteration
CPU_MARK = "iteration "

# What says on which side of autograd an operator runs: the nearest of these around it.
BACKWARD = re.compile(r"^autograd::engine|Backward\d*$|post_backward|^torch::autograd::")
FORWARD = re.compile(
    r"^(CompiledFunction|Torch-Compiled|Linear\w*|LowPrecision\w+|EmbeddingFunction)|^aten::linear$"
)


class Place(NamedTuple):
    """Where in the code a piece of work belongs."""

    operator: str  # the innermost one
    path: str  # the operators around it, from the outside, with ' > ' between them
    shapes: tuple[Shape, ...]  # of the nearest operator that has tensors
    phase: str  # 'forward', 'backward', 'recompute' (a forward within the backward) or 'update'
    call: int  # a number of this call: one operator may launch several kernels


@dataclass(frozen=True)
class Work:
    """A kernel, a copy or a memset on a GPU; an operator's own time on a CPU. Times in microseconds."""

    name: str
    start: float
    end: float
    stream: int
    device: bool
    launched: float | None = None  # when the host launched it, if that is known
    grid: str = ""
    place: Place | None = None

    @property
    def kind(self) -> tuple[str, str]:
        """What tells it apart from other kernels in both windows."""
        return self.name, self.grid


@dataclass
class Recording:
    """One window of one rank."""

    work: list[Work]  # by start
    marks: list[float]  # the start of each iteration, and the end of the last
    marks_launched: list[float] = field(default_factory=list)  # the same by the host, in the trace's time

    def iteration(self, number: int) -> list[Work]:
        """The work that starts between two marks."""
        begin, end = self.marks[number : number + 2]
        return [work for work in self.work if begin <= work.start < end]


def read_events(path: Path) -> list[Event]:
    """The events that have a duration."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error) as error:
        raise RunError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from None
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def recording(events: list[Event]) -> Recording:
    device = [event for event in events if event.get("cat") in DEVICE]
    return _of_gpu(events, device) if device else _of_cpu(events)


# --- a GPU ---


def _of_gpu(events: list[Event], device: list[Event]) -> Recording:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH and "correlation" in event.get("args", {})
    }
    marks = [event for event in device if GPU_MARK in event["name"]]
    if len(marks) < 2:
        raise RunError(f"the trace has {len(marks)} marks of iterations; it needs two or more")
    places = _places(events, list(launches.values()))
    found = []
    for event in device:
        if GPU_MARK in event["name"]:
            continue
        args = event["args"]
        launch = launches.get(args.get("correlation"))
        found.append(
            Work(
                event["name"],
                event["ts"],
                event["ts"] + event["dur"],
                args.get("stream", 0),
                device=True,
                launched=launch["ts"] if launch else None,
                grid=str(args.get("grid", "")),
                place=places.get(id(launch)) if launch else None,
            )
        )
    found.sort(key=lambda work: work.start)
    of_marks = [launches.get(event["args"].get("correlation")) for event in marks]
    launched = [launch["ts"] for launch in of_marks if launch]
    return Recording(found, sorted(event["ts"] for event in marks), sorted(launched))


def _places(events: list[Event], launches: list[Event]) -> dict[int, Place]:
    """{id of a launch: its place}. Empty if the window has no operators."""
    host = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST:
            host[event["tid"]].append(event)
    if not host:
        return {}
    updates = Updates(host)
    by_thread = defaultdict(list)
    for launch in launches:
        by_thread[launch["tid"]].append(launch)
    return {
        id(launch): place_of(stack, updates.phase(stack, launch["ts"]))
        for thread, launched in by_thread.items()
        for launch, stack in _stacks(host[thread], launched)
        if stack
    }


def _stacks(operators: list[Event], moments: list[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Each moment of a thread with the operators that are running then, from the outside."""
    operators = sorted(operators, key=lambda event: (event["ts"], -event["dur"]))
    stack: list[Event] = []
    position = 0
    for moment in sorted(moments, key=lambda event: event["ts"]):
        while position < len(operators) and operators[position]["ts"] <= moment["ts"]:
            _leave(stack, operators[position]["ts"])
            stack.append(operators[position])
            position += 1
        _leave(stack, moment["ts"])
        yield moment, stack


def _leave(stack: list[Event], now: float) -> None:
    while stack and stack[-1]["ts"] + stack[-1]["dur"] <= now:
        stack.pop()


# --- places ---


class Updates:
    """Tells the update from the forward: neither is inside a function of autograd, but the update comes after
    the last backward of its iteration."""

    def __init__(self, host: dict[int, list[Event]]):
        every = [event for events in host.values() for event in events]
        self.marks = sorted(e["ts"] for e in every if e["name"].startswith(CPU_MARK))
        backwards = [e["ts"] + e["dur"] for e in every if BACKWARD.search(e["name"])]
        self.last = [
            max((end for end in backwards if begin <= end < stop), default=stop)
            for begin, stop in zip([float("-inf"), *self.marks], [*self.marks, float("inf")], strict=True)
        ]

    def phase(self, stack: Sequence[Event], now: float) -> str:
        names = [event["name"] for event in reversed(stack)]
        nearest = next((name for name in names if BACKWARD.search(name) or FORWARD.search(name)), None)
        if nearest and BACKWARD.search(nearest):
            return "backward"
        if nearest:
            return "recompute" if any(BACKWARD.search(name) for name in names) else "forward"
        iteration = sum(mark <= now for mark in self.marks)
        return "update" if now >= self.last[iteration] else "forward"


def place_of(stack: Sequence[Event], phase: str) -> Place:
    names = [event["name"] for event in stack if not event["name"].startswith(CPU_MARK)]
    shapes = next((found for event in reversed(stack) if (found := _shapes(event))), ())
    operator = names[-1] if names else ""
    return Place(operator, " > ".join(names), shapes, phase, id(stack[-1]))


def _shapes(event: Event) -> tuple[Shape, ...]:
    """Of an operator's tensors; a list of tensors counts as its first one."""
    found = []
    for dims in event.get("args", {}).get("Input Dims", []):
        while dims and isinstance(dims[0], list):
            dims = dims[0]
        if dims:
            found.append(tuple(dims))
    return tuple(found)


def give_places(recorded: Sequence[Work], known: Sequence[Work]) -> list[Work]:
    """The work of an iteration with the places of another: the k-th kernel of a kind gets that of the k-th
    kernel of this kind. None where an iteration has more of a kind than the other."""
    places = defaultdict(list)
    for work in known:
        places[work.kind].append(work.place)
    counts = Counter(work.kind for work in recorded)
    positions: dict[tuple[str, str], int] = defaultdict(int)
    placed = []
    for work in recorded:
        here = places[work.kind]
        place = here[positions[work.kind]] if len(here) == counts[work.kind] else _common(here)
        positions[work.kind] += 1
        placed.append(replace(work, place=place))
    return placed


def _common(places: list[Place | None]) -> Place | None:
    """The place that all of them share but for the call and the path; None if they differ."""
    distinct = {(place.operator, place.shapes, place.phase) if place else None for place in places}
    return places[0] if len(distinct) == 1 else None


# --- a CPU ---


def _of_cpu(events: list[Event]) -> Recording:
    """The main thread's operators. Others, such as those of a process group, run beside it."""
    marks = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(CPU_MARK)]
    if len(marks) < 2:
        raise RunError(f"the trace has {len(marks)} marks of iterations; it needs two or more")
    main = marks[0]["tid"]
    operators = [event for event in events if event.get("cat") in HOST and event["tid"] == main]
    updates = Updates({main: operators})
    work = []
    for start, end, stack in _own_times(operators):
        if stack[-1]["name"].startswith(CPU_MARK):
            continue
        place = place_of(stack, updates.phase(stack, start))
        work.append(Work(place.operator, start, end, 0, device=False, launched=start, place=place))
    times = sorted(event["ts"] for event in marks)
    return Recording(work, times, times)


def _own_times(operators: list[Event]) -> Iterator[tuple[float, float, list[Event]]]:
    """(start, end, operators from the outside) of each time in which the same operator is the innermost."""
    stack: list[Event] = []
    now = 0.0

    def leave_until(moment: float) -> Iterator[tuple[float, float, list[Event]]]:
        nonlocal now
        while stack and (end := stack[-1]["ts"] + stack[-1]["dur"]) <= moment:
            if end > now:
                yield now, end, list(stack)
                now = end
            stack.pop()

    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        yield from leave_until(event["ts"])
        if stack and event["ts"] > now:
            yield now, event["ts"], list(stack)
        now = event["ts"]
        stack.append(event)
    yield from leave_until(float("inf"))
