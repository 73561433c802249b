"""Tells how much memory this machine has, and has left. Defines GIB and GB. Figures in the run record whose
names end in _gb are GiB, as torch and nvidia-smi count."""

from __future__ import annotations

import math
import os
import resource
import sys
from pathlib import Path

GIB = 2**30
GB = 10**9
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def resident_bytes() -> float:
    """Main memory that this process holds now; where there is no /proc, the most that it has held."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(most if sys.platform == "darwin" else 1024 * most)  # bytes there, KiB elsewhere
    return float(pages * resource.getpagesize())


def host_bytes() -> int:
    """Memory that this machine has in all, or that its container may use."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        limits.append(int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or no limit: 'max'
        pass
    return min(limits)


def free_host_bytes() -> float:
    """Memory that this machine has left without swapping; infinity if it cannot be found out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * kib[0] if kib else math.inf
