"""Units of memory, and how much of it this machine has left. Figures in the run record whose names end in _gb
are GiB, as torch and nvidia-smi count."""

from __future__ import annotations

import math
from pathlib import Path

GIB = 2**30
GB = 10**9


def free_host_bytes() -> float:
    """What this machine can still give without swapping; infinity where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * kib[0] if kib else math.inf
