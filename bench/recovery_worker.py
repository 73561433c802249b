"""One rank of bench.recovery: train.py, which notes in a file when each step of its start was done.

    python bench/recovery_worker.py MARKS CONFIG [--key=value ...]

MARKS gets a line of JSON for each mark. The rank whose number is in MARKS.raise raises an error.
"""

from __future__ import annotations

import json
import os
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


def main(marks: Path, argv: list[str]) -> int:
    rank, order = launch_info()[0], marks.with_suffix(".raise")

    def mark(name: str, at: float | None = None, **facts: int) -> None:
        line = {"mark": name, "time": at or time.time(), "rank": rank, "pid": os.getpid(), **facts}
        with open(marks, "ab", buffering=0) as file:  # one write, so the ranks' lines do not mix
            file.write(f"{json.dumps(line)}\n".encode())

    def marked(owner: Any, name: str) -> None:
        """Marks the end of each call of owner.name."""
        real = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            if name == "count" and order.exists() and order.read_text() == str(rank):
                order.unlink()
                mark("raised")
                raise RuntimeError(f"the error of rank {rank} that the benchmark asked for")
            result = real(*arguments)
            mark(name, **({"iter": arguments[1].iteration} if name == "write" else {}))
            return result

        setattr(owner, name, call)

    mark("python", PYTHON_STARTED)
    mark("imports")
    for step in STEPS:
        marked(train, step)
    for event in (
        "count",
        "write",
        "saved",
    ):  # an iteration is computed, is in a row; a checkpoint is complete
        marked(Logger, event)
    return train.run(argv)


if __name__ == "__main__":
    leave_now(main(Path(sys.argv[1]), sys.argv[2:]))
