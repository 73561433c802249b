"""Reads a trace of torch.profiler as pieces of work with their parts: kernels of a GPU, operators of a CPU.

A kernel belongs to the operators and ranges (ops/ranges.py) around its launch on the host. A node of autograd
has the sequence number of the operator whose gradient it computes, and so the range of that operator.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ops.ranges import BACKWARD, BLOCK, FORWARD, PREFIX
from tools.profile.parts import COMPILED, RECOMPUTE, Part, Parts, Place

Event = dict[str, Any]  # of the Chrome trace

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation")
LAUNCH = ("cuda_runtime", "cuda_driver")
MARK = re.compile(r"^iteration \d|spin_kernel")  # training/records/profiler.py: on a CPU, on a GPU
NUMBER = "Sequence number"

OPERATORS = "nanomfu::"  # of ops/
NAMED = (OPERATORS, PREFIX, "FSDP::", "Optimizer.step")  # torch names ranges of its own, too
UNNAMED = (PREFIX + FORWARD, PREFIX + BACKWARD, PREFIX + BLOCK)
NODE = "autograd::engine"
WRAPPERS = (*UNNAMED, NODE, "Torch-Compiled Region", *COMPILED)  # around the code's own calls


class Work(NamedTuple):
    """A kernel, a copy or a memset on a GPU; an operator on a CPU, with those inside it."""

    name: str
    start: float  # microseconds
    end: float
    grid: str | None  # None: on a CPU
    part: Part


def read_trace(path: Path, model: Parts) -> tuple[list[list[Work]], list[float]]:
    """(the work that starts in each iteration, by start; the start of each, and the end of the last). Raises
    OSError, ValueError or others if it cannot be read."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        content = json.load(file)["traceEvents"]
    events = [{"args": {}, **event} for event in content if event.get("ph") == "X" and "dur" in event]
    marked = [event for event in events if MARK.search(event["name"])]
    if len(marked) < 2:
        raise ValueError(f"it has {len(marked)} marks of iterations; it needs two or more")
    events = sorted((e for e in events if not MARK.search(e["name"])), key=lambda e: (e["ts"], -e["dur"]))
    around = list(stacks(events))
    names = names_by_number(around)
    device = [event for event in events if event.get("cat") in DEVICE]
    if device:
        launches = {event["args"].get("correlation"): stack for event, stack in around}
        found = [(event, launches.get(event["args"].get("correlation"))) for event in device]
    else:  # of the main thread; those of others, such as a process group's, run beside it
        found = [(event, stack) for event, stack in around if event["tid"] == marked[0]["tid"]]
    work = []
    for event, stack in found:
        name, grid = event["name"], str(event["args"].get("grid", "")) if device else None
        part = model.of(name, place_of(stack, names) if stack else None, on_gpu=bool(device))
        work.append(Work(name, event["ts"], event["ts"] + event["dur"], grid, part))
    marks = sorted(event["ts"] for event in marked)
    return [[each for each in work if a <= each.start < b] for a, b in itertools.pairwise(marks)], marks


def stacks(events: Iterable[Event]) -> Iterator[tuple[Event, Sequence[Event]]]:
    """Each event of the host, with the operators and ranges of its thread that it is in, from the outside; an
    operator is in itself. Events are sorted by start."""
    threads: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") in HOST + LAUNCH:
            stack = threads[event["tid"]]
            while stack and stack[-1]["ts"] + stack[-1]["dur"] <= event["ts"]:
                stack.pop()
            stack += [event] * (event["cat"] in HOST)
            yield event, tuple(stack)


def names_by_number(around: Iterable[tuple[Event, Sequence[Event]]]) -> dict[int, str]:
    """{sequence number of an operator in the forward: the range that it is in}. Operators without a gradient
    have the number of the next one that has one, so the last counts."""
    numbered = [(event["args"], stack) for event, stack in around if NUMBER in event["args"]]
    found = {args[NUMBER]: range_of(stack) for args, stack in numbered if not args.get("Fwd thread id")}
    return {number: name for number, name in found.items() if name}


def range_of(stack: Sequence[Event]) -> str:
    """The innermost range or operator of NAMED, without '_backward'; '' if there is none."""
    for name in (event["name"] for event in reversed(stack)):
        if name.startswith(OPERATORS):
            return name.removeprefix(OPERATORS).partition("_backward")[0]
        if name.startswith(NAMED) and name not in UNNAMED:
            return name.removeprefix(PREFIX)
    return ""


def place_of(stack: Sequence[Event], names: dict[int, str]) -> Place:
    """names: names_by_number()'s."""
    path = tuple(event["name"] for event in stack)
    node = max((i for i, name in enumerate(path) if name.startswith(NODE)), default=None)
    name = range_of(stack[node or 0 :])
    if node is None:
        phase = next((each for each in (BACKWARD, FORWARD) if PREFIX + each in path), "")
    elif any(each.startswith(PREFIX) for each in path[node:]):
        phase = RECOMPUTE  # only a forward has ranges
    else:
        phase, name = BACKWARD, name or names.get(stack[node]["args"].get(NUMBER, -1), "")
    calls = (each for each in path if not each.startswith(WRAPPERS))
    shapes = tuple(tuple(dims) for dims in stack[-1]["args"].get("Input Dims", []) if dims)
    return Place(name or next(calls, path[-1]), path, shapes, phase)
