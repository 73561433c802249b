"""Tells how much main memory this process may use, and how much of it is left. Defines GIB and GB. Figures in
the run record whose names end in _gb are GiB, as torch and nvidia-smi count.

A container or a job of Slurm may have less than the machine: the kernel's cgroups limit it, and kill a
process that goes beyond. Source: cgroups(7), and cgroup-v1/memory and cgroup-v2 in the kernel's
documentation.
"""

from __future__ import annotations

import math
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

GIB = 2**30
GB = 10**9
PROCESS, MEMORY = Path("/proc/self"), Path("/proc/meminfo")
# For each version of cgroups: the files with a limit, the file with what is used, and the line of memory.stat
# with the file cache in it, which the kernel drops first.
CGROUP_FILES = {
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
MOUNT = Path("/sys/fs/cgroup")  # where every distribution and container has them


def resident_bytes() -> float:
    """Main memory that this process holds now; where there is no /proc, the most that it has held."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else 1024 * most)  # bytes there, KiB elsewhere
    return float(pages * resource.getpagesize())


def host_bytes() -> int:
    """Memory that this process may use at most: the machine's, or what a container or job has of it."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for limit, _ in _cgroup_limits())])


def free_host_bytes() -> float:
    """Memory that this process can still take without swapping and without being killed; infinity if it
    cannot be found out. Other processes of the machine, container or job take from the same."""
    left = [1024.0 * found for found in _numbers(MEMORY, "MemAvailable:")]
    left += [float(limit - used) for limit, used in _cgroup_limits()]
    return max(0.0, min(left, default=math.inf))


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes used) of each cgroup that this process is in. Those above its own limit it, too."""
    for version, folder in _cgroups():
        names, usage, cache = CGROUP_FILES[version]
        stated = [number for name in names for number in _numbers(folder / name) if number > 0]
        used = sum(_numbers(folder / usage)) - sum(_numbers(folder / "memory.stat", cache))
        if stated:
            yield min(stated), max(used, 0)


def _cgroups() -> Iterator[tuple[str, Path]]:
    """(version, folder) of this process's cgroups with memory: its own, then those above it."""
    for line in _lines(PROCESS / "cgroup"):  # such as 4:cpu,memory:/job_1/step_0, or 0::/job_1/step_0
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version, top = ("cgroup", MOUNT / "memory") if controllers else ("cgroup2", MOUNT)
        names = [] if ".." in path.split("/") else path.strip("/").split("/")
        # a container's own cgroup is mounted as the top, so the names above it are not there
        while names and not top.joinpath(*names).is_dir():
            names.pop(0)
        for count in range(len(names), -1, -1):
            yield version, top.joinpath(*names[:count])


def _numbers(path: Path, name: str = "") -> list[int]:
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
