"""Tells how much memory this machine has left, and defines GIB and GB. Figures in the run record whose
names end in _gb are GiB, as torch and nvidia-smi count."""

from __future__ import annotations

import math
from pathlib import Path

GIB = 2**30
GB = 10**9


def free_host_bytes() -> float:
    """Memory that this machine has left without swapping; infinity if it cannot be found out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024.0 * kib[0] if kib else math.inf
