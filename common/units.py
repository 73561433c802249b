"""Writes quantities in a unit that fits their size: a laptop's run is as readable as a node's."""

from __future__ import annotations

SCALES = {"T": 1e12, "G": 1e9, "B": 1e9, "M": 1e6, "K": 1e3, "k": 1e3}


def flops(value: float, decimals: int = 1, prefixes: str = "TGMk") -> str:
    """'1879.4 TF', '112.0 GF'."""
    return f"{_scaled(value, prefixes, decimals)}F"


def tokens(value: float, decimals: int = 3) -> str:
    """'81.727 B tokens', '614.400 K tokens'."""
    return f"{_scaled(value, 'BMK', decimals).rstrip()} tokens"


def memory(gib: float) -> str:
    """'13.53 GiB', '3.21 MiB'."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{1024 * gib:.2f} MiB"


def duration(seconds: float) -> str:
    """'45.0 s', '12.3 min', '3.2 h'."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} s"


def _scaled(value: float, prefixes: str, decimals: int) -> str:
    """The number with the first prefix that makes it at least 1: '112.0 G'; '7 ' below a thousand."""
    for prefix in prefixes:
        if abs(value) >= SCALES[prefix]:
            return f"{value / SCALES[prefix]:.{decimals}f} {prefix}"
    return f"{value:.3g} "
