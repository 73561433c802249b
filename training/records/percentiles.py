"""Median, 10th and 90th percentile of measurements: for the run record's summary and the tables of bench/.

A percentile is numpy's with method="nearest": always one of the measured values, never a value between two of
them. plots/run_record.py makes the same call, because plots/ imports nothing from training/.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """None if there are no values."""
    if not values:
        return None
    p10, p90 = np.percentile(values, [10, 90], method="nearest").tolist()
    return {"median": statistics.median(values), "p10": p10, "p90": p90}
