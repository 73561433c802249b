"""Tells how much main memory this process may use, and how much of it is left. Defines GIB and GB. Figures in
the run record whose names end in _gb are GiB, as torch and nvidia-smi count.

A container or a job of Slurm may have less than the machine: the kernel's cgroups limit it, and kill a
process that goes beyond. Source: cgroup-v1/memory and cgroup-v2 in the kernel's documentation.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from common.cgroups import cgroups, numbers

GIB = 2**30
GB = 10**9
MEMORY = Path("/proc/meminfo")
# Of a cgroup, in versions 1 and 2: the files with a limit and with what is used, and the line of memory.stat
# with the file cache in it, which the kernel drops first. Version 1 has both lines; the first counts.
LIMITS, USED = (
    ("memory.limit_in_bytes", "memory.max", "memory.high"),
    ("memory.usage_in_bytes", "memory.current"),
)
CACHE = ("total_inactive_file", "inactive_file")


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
    left = [1024.0 * found for found in numbers(MEMORY, "MemAvailable:")]
    left += [float(limit - used) for limit, used in _cgroup_limits()]
    return max(0.0, min(left, default=math.inf))


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes used) of each cgroup that this process is in. Those above its own limit it, too."""
    for folder in cgroups("memory"):
        stated = [number for name in LIMITS for number in numbers(folder / name) if number > 0]
        used = [number for name in USED for number in numbers(folder / name)]
        cache = [number for name in CACHE for number in numbers(folder / "memory.stat", name)]
        if stated:
            yield min(stated), max(sum(used) - sum(cache[:1]), 0)
