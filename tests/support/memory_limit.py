"""A real limit of memory for a process, as a container or a job of Slurm has it."""

import contextlib
import os
import re
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

# Run by warm Python: enters the cgroup, then becomes the script.
ENTER = """
import os, runpy, sys
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
sys.argv = sys.argv[2:]
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextlib.contextmanager
def memory_limit(folder: Path, size: int) -> Iterator[list[str]]:
    """What stands before `train.py ...` for a process that the kernel kills above `size` bytes. The limit is
    that of a cgroup above the process's own, as Slurm makes them. Skips where no cgroup can be made."""
    job = _make_cgroup(size)
    enter = folder / "enter.py"
    enter.write_text(ENTER)
    try:
        (job / "step").mkdir()
        yield [sys.executable, str(enter), str(job / "step" / "cgroup.procs")]
    finally:
        for path in (job / "step", job):
            for _ in range(100):  # until the kernel has taken leave of a process that it killed
                with contextlib.suppress(OSError):
                    path.rmdir()
                    break
                time.sleep(0.05)


def _make_cgroup(size: int) -> Path:
    mounts = Path("/proc/self/mountinfo").read_text() if os.path.exists("/proc/self/mountinfo") else ""
    for place, kind, options in re.findall(r"^(?:\S+ ){4}(\S+) .*- (cgroup2?) \S+ (\S+)$", mounts, re.M):
        if kind == "cgroup" and "memory" not in options.split(","):
            continue
        name = "memory.limit_in_bytes" if kind == "cgroup" else "memory.max"
        job = Path(place) / f"nanomfu-test-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            job.mkdir()
            if (job / name).exists():
                (job / name).write_text(str(size))
                return job
            job.rmdir()
    pytest.skip("no cgroup with a limit of memory can be made here: it needs root")
