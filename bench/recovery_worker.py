"""One rank of bench.recovery: train.py, which notes in a file when each step of its start was done.

bench/recovery.py starts it under torchrun with MARKS CONFIG [--key=value ...]. MARKS gets a line of JSON for
each mark. SIGUSR2 asks for an error, which comes after the next log row.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

PYTHON_STARTED = time.time()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train  # noqa: E402 - the time before it is measured
from training.process.exit_status import leave_now  # noqa: E402
from training.process.launch import launch_info  # noqa: E402
from training.records.rows import Logger  # noqa: E402

STEPS = ("check_inputs", "join_ranks", "find_resume", "build_step", "load_resume", "begin_record")
ASKED: list[int] = []  # signals that ask for an error


def mark(name: str, at: float, iteration: int = -1) -> None:
    line = {"mark": name, "time": at, "iter": iteration, "rank": launch_info()[0], "pid": os.getpid()}
    with open(sys.argv[1], "ab", buffering=0) as file:  # one write, so the ranks' lines do not mix
        file.write(f"{json.dumps(line)}\n".encode())


def marked(owner: Any, name: str) -> None:
    """Marks the end of each call of owner.name."""
    real = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = real(*arguments)
        mark(name, time.time(), arguments[1].iteration if name == "write" else -1)
        if ASKED and name == "write":
            raise RuntimeError(f"the error of rank {launch_info()[0]} that the benchmark asked for")
        return result

    setattr(owner, name, call)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, lambda number, frame: ASKED.append(number))
    mark("python", PYTHON_STARTED)
    mark("imports", time.time())
    for step in STEPS:
        marked(train, step)
    for event in ("write", "saved"):  # a row is in the record; a checkpoint is complete
        marked(Logger, event)
    leave_now(train.run(sys.argv[2:]))
