"""Reads a trace of torch.profiler as pieces of work, each with the place in the code that it belongs to:
kernels on a GPU, operators on a CPU.

A GPU's kernel belongs to the operators and ranges (ops/ranges.py) around its launch on the host. Operators of
autograd have the sequence number of the operator whose gradient they compute, and so the name of its range.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import RunError
from ops.ranges import BACKWARD, BLOCK, FORWARD, PREFIX

Event = dict[str, Any]  # of the Chrome trace
Shape = tuple[int, ...]

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation")
LAUNCH = ("cuda_runtime", "cuda_driver")
GPU_MARK = "spin_kernel"  # training/records/profiler.py launches it before each iteration
CPU_MARK = "iteration "
RECOMPUTE = "recompute"  # the phase of a forward within the backward
NUMBER = "Sequence number"

OPERATORS = "nanomfu::"  # of ops/
NAMED = (OPERATORS, PREFIX, "FSDP::", "Optimizer.step")  # torch names ranges of its own, too
UNNAMED = (PREFIX + FORWARD, PREFIX + BACKWARD, PREFIX + BLOCK)
# what autograd and torch.compile put around the code's own calls
COMPILED = ("CompiledFunction", "## Call CompiledFxGraph")
WRAPPERS = (*UNNAMED, "autograd::engine", "Torch-Compiled Region", *COMPILED)


class Place(NamedTuple):
    """Where in the code a piece of work belongs."""

    name: str  # the innermost range or operator of NAMED; without one, the outermost call
    path: tuple[str, ...]  # ranges and operators, from the outside
    shapes: tuple[Shape, ...]  # of the nearest operator that has tensors
    phase: str  # FORWARD, BACKWARD, RECOMPUTE or '': before and after them
    call: int  # a number of this call: one operator may launch several kernels

    @property
    def operator(self) -> str:
        return self.path[-1]


@dataclass(frozen=True)
class Work:
    """A kernel, a copy or a memset on a GPU; an operator on a CPU, with those inside it. Times in
    microseconds."""

    name: str
    start: float
    end: float
    device: bool
    grid: str = ""
    place: Place | None = None


@dataclass
class Recording:
    """One window of one rank."""

    work: list[Work]  # by start
    marks: list[float]  # the start of each iteration, and the end of the last

    def iteration(self, number: int) -> list[Work]:
        """The work that starts between two marks."""
        begin, end = self.marks[number : number + 2]
        return [work for work in self.work if begin <= work.start < end]


def read_recording(path: Path) -> Recording:
    """Raises RunError."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, EOFError, ValueError, LookupError, TypeError, zlib.error) as error:
        raise RunError(f"{path.name} cannot be read: {type(error).__name__}: {error}") from None
    events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    device = [event for event in events if event.get("cat") in DEVICE]
    found = _of_gpu(events, device) if device else _of_cpu(events)
    if len(found.marks) < 2:
        raise RunError(f"the trace has {len(found.marks)} marks of iterations; it needs two or more")
    return found


def _of_gpu(events: list[Event], device: list[Event]) -> Recording:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH and "correlation" in event.get("args", {})
    }
    places = _places(events, list(launches.values()))
    work, marks = [], []
    for event in device:
        args = event["args"]
        launch = launches.get(args.get("correlation"))
        if GPU_MARK in event["name"]:
            marks.append(event["ts"])
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        grid, place = str(args.get("grid", "")), places.get(id(launch)) if launch else None
        work.append(Work(event["name"], start, end, True, grid, place))
    return Recording(sorted(work, key=lambda each: each.start), sorted(marks))


def _of_cpu(events: list[Event]) -> Recording:
    """The main thread's operators. Others, such as those of a process group, run beside it."""
    host = [event for event in events if event.get("cat") in HOST]
    marks = [event for event in host if event["name"].startswith(CPU_MARK)]
    mains = {mark["tid"] for mark in marks}
    operators = [e for e in host if e["tid"] in mains and not e["name"].startswith(CPU_MARK)]
    places = _places(operators, operators)
    work = [Work(e["name"], e["ts"], e["ts"] + e["dur"], False, place=places.get(id(e))) for e in operators]
    times = sorted(event["ts"] for event in marks)
    return Recording(sorted(work, key=lambda each: each.start), times)


# --- places ---


def _places(events: list[Event], moments: list[Event]) -> dict[int, Place]:
    """{id of a moment's event: its place}. Empty if the window has no operators."""
    host = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST and not event["name"].startswith(CPU_MARK):
            host[event["tid"]].append(event)
    every = [event for of_thread in host.values() for event in of_thread]
    # (begin, end) of each. On a GPU the operators of a backward are in a thread of autograd.
    backwards = [(e["ts"], e["ts"] + e["dur"]) for e in every if e["name"] == PREFIX + BACKWARD]
    names, found = _names_by_number(host), {}
    for thread, operators in host.items():
        for moment, stack in _stacks(operators, [each for each in moments if each["tid"] == thread]):
            if stack:
                in_backward = any(begin <= moment["ts"] < end for begin, end in backwards)
                found[id(moment)] = place_of(stack, in_backward, names)
    return found


def _stacks(operators: list[Event], moments: list[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Each moment of a thread with the operators that are running then, from the outside."""
    operators = sorted(operators, key=lambda event: (event["ts"], -event["dur"]))
    stack: list[Event] = []
    position = 0
    for moment in sorted(moments, key=lambda event: (event["ts"], -event["dur"])):
        while position < len(operators) and operators[position]["ts"] <= moment["ts"]:
            _leave(stack, operators[position]["ts"])
            stack.append(operators[position])
            position += 1
        _leave(stack, moment["ts"])
        yield moment, list(stack)


def _leave(stack: list[Event], now: float) -> None:
    while stack and stack[-1]["ts"] + stack[-1]["dur"] <= now:
        stack.pop()


def _names_by_number(host: dict[int, list[Event]]) -> dict[int, str]:
    """{sequence number of an operator in the forward: the range that it is in}. Operators without a gradient
    have the number of the next one that has one, so the last counts."""
    found = {}
    for events in host.values():
        numbered = [e for e in events if NUMBER in e.get("args", {}) and not e["args"].get("Fwd thread id")]
        for event, stack in _stacks(events, numbered):
            found[event["args"][NUMBER]] = _innermost(stack)
    return {number: name for number, name in found.items() if name}


def _innermost(stack: Sequence[Event]) -> str:
    """The name of a range or an operator of NAMED, without '_backward'; '' if there is none."""
    names = (event["name"] for event in reversed(stack) if event["name"] not in UNNAMED)
    name = next((name for name in names if name.startswith(NAMED)), "")
    if name.startswith(OPERATORS):
        name = name.removeprefix(OPERATORS).partition("_backward")[0]
    return name.removeprefix(PREFIX)


def place_of(stack: Sequence[Event], in_backward: bool, names: dict[int, str]) -> Place:
    """names: _names_by_number()'s."""
    path = tuple(event["name"] for event in stack)
    phase = BACKWARD if in_backward else FORWARD if PREFIX + FORWARD in path else ""
    node = max((i for i, name in enumerate(path) if name.startswith("autograd::engine")), default=None)
    name = _innermost(stack if node is None else stack[node:])
    within = set(path[node or 0 :]) - {PREFIX + BACKWARD}
    if in_backward and any(each.startswith(PREFIX) for each in within):
        phase = RECOMPUTE  # only a forward has ranges
    elif node is not None and not name:
        name = names.get(stack[node].get("args", {}).get(NUMBER, -1), "")
    calls = (each for each in path if not each.startswith(WRAPPERS))
    shapes = next((found for event in reversed(stack) if (found := _shapes(event))), ())
    return Place(name or next(calls, path[-1]), path, shapes, phase, id(stack[-1]))


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
    """The work of an iteration with the places of another: the k-th kernel of a kind (name and grid) gets
    that of the k-th of this kind. None where there are more of a kind than there, and those are not alike."""
    places: dict[tuple[str, str], list[Place | None]] = defaultdict(list)
    for work in known:
        places[work.name, work.grid].append(work.place)
    counts = Counter((work.name, work.grid) for work in recorded)
    position: Counter = Counter()
    placed = []
    for work in recorded:
        kind = work.name, work.grid
        here = places[kind]
        if len(here) == counts[kind]:
            place = here[position[kind]]
        else:
            distinct = {each and (each.name, each.operator, each.shapes, each.phase) for each in here}
            place = here[0] if len(distinct) == 1 else None
        position[kind] += 1
        placed.append(replace(work, place=place))
    return placed
