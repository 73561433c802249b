"""Names parts of a step for torch.profiler. tools.profile sorts kernels and operators by these names. A part
that has an operator in ops/ has its name.

A range costs about 1 us where no profiler runs, and nothing in compiled code, which leaves it out. It is no
torch.profiler.record_function: that one is an operator, which costs 5 us without a profiler, and which a
checkpoint that chooses operators (ops/recompute.py) would keep or repeat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch
from torch._C._profiler import _RecordFunctionFast

PREFIX = "nanomfu: "  # of a range in a trace; operators of ops/ begin with nanomfu::
FORWARD, BACKWARD, BLOCK = "forward", "backward", "block"  # that something is inside of these is no name
OPTIMIZER = "optimizer"

P = ParamSpec("P")
R = TypeVar("R")


def named_range(name: str) -> AbstractContextManager:
    """For code that is never compiled."""
    return _RecordFunctionFast(PREFIX + name)


def ranged(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: each call of the function is a range of this name, except in compiled code."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def in_range(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with named_range(name):
                return function(*args, **kwargs)

        return in_range

    return decorate
