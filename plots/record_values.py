"""Values of a run record or profile, which may come from anybody: what is not of the type that a reader needs
counts as missing.
"""

from __future__ import annotations

import math
from typing import Any

LARGEST = 1e30  # FLOP/s of the largest machines are 1e19; far larger ones overflow on the way to the plot


def as_float(value: Any, default: float = math.nan) -> float:
    """The value as a float; `default` if it is no number, or one that no quantity of a run can have."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST else default  # NaN is below nothing


def as_dict(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def dicts(record: dict, key: str) -> list[dict]:
    rows = record.get(key)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
