"""Tells what this process may use of the machine where a container or a job of Slurm limits it.

Source: cgroups(7), and scheduler/sched-bwc and cgroup-v2 in the kernel's documentation.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")
MOUNT = Path("/sys/fs/cgroup")  # where every distribution and container has them
CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")  # of version 2; of version 1


def usable_cores() -> int:
    """The cores that taskset or Slurm leaves to this process, or fewer if a container's quota is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in cgroups("cpu"):
        stated = " ".join(line for name in CPU_FILES for line in _lines(folder / name))
        if quota := re.fullmatch(r"(\d{1,15}) ([1-9]\d{0,14})", stated):  # microseconds, of a period
            cores = min(cores, math.ceil(int(quota[1]) / int(quota[2])))
    return max(1, cores)


def cgroups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups with this controller: its own, then those above it."""
    for line in _lines(PROCESS / "cgroup"):  # such as 4:cpu,memory:/job_1/step_0, or 0::/job_1/step_0
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = MOUNT / controller if controllers else MOUNT  # version 1, version 2
        names = [] if ".." in path.split("/") else path.strip("/").split("/")
        # a container's own cgroup is mounted as the top, so the names above it are not there
        while names and not top.joinpath(*names).is_dir():
            names.pop(0)
        for count in range(len(names), -1, -1):
            yield top.joinpath(*names[:count])


def numbers(path: Path, name: str = "") -> list[int]:
    """The whole numbers that begin the lines of a file; with `name`, those that follow this word. 'max', a
    file that is missing, and one that is something else have none."""
    begin = rf"{re.escape(name)}\s+" if name else ""
    found = (re.match(rf"{begin}(\d{{1,20}})\b", line) for line in _lines(path))
    return [int(number[1]) for number in found if number]


def _lines(path: Path) -> list[str]:
    try:
        return os.fsdecode(path.read_bytes()).splitlines()
    except OSError:
        return []
