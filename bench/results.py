"""Figures of one run from its rows, and of a variant from its runs: medians, 10th and 90th percentiles.

The rows are the training_iterations of a run record; bench.peer prints rows of the same form. The first row
is the first iteration, which includes compilation. Of the others only those count that begin after the
warm-up.
"""

from __future__ import annotations

import statistics

from bench.plan import Entry
from training.hardware.nvml import FIELDS
from training.records import percentiles
from training.records.machine import known, missing_reason

RATES = ("tokens_per_sec", "tokens_per_sec_per_gpu", "time_ms")
SERIES = ("mfu_percent", "mfu_causal_percent", "mfu_fp8_percent", *RATES, *FIELDS)


def measure(rows: list[dict], warmup: int) -> dict:
    """The figures of one run. SERIES are lists with one value for each row that has it; memory is None on a
    CPU. Raises ValueError if no row counts."""
    if not rows:
        raise ValueError("the run has no rows")
    last_before = [-1] + [row["iter"] for row in rows[:-1]]  # the last iteration before each row
    steady = [row for row, last in zip(rows, last_before, strict=True) if last >= warmup]
    if not steady:
        raise ValueError(f"no row begins after {warmup} iterations of warm-up; use more --iters")
    memory = [row["memory"] for row in rows if row["memory"]]
    mfus = [row["mfu"] for row in steady if row["mfu"]]
    return {
        "first_step_s": rows[0]["time_ms"] / 1000,
        "rows": len(steady),
        "mfu_percent": [mfu["mfu_percent"] for mfu in mfus],
        "mfu_causal_percent": [mfu["mfu_causal_percent"] for mfu in mfus],
        # of a run with fp8 matmuls, on a GPU whose fp8 peak is known
        "mfu_fp8_percent": [mfu["mfu_fp8_percent"] for mfu in mfus if mfu.get("mfu_fp8_percent")],
        **{name: [row[name] for row in steady] for name in RATES},
        "mfu_reason": None if mfus else steady[-1]["mfu_reason"],
        **{name: known(steady, name) for name in FIELDS},
        "gpu_reason": missing_reason(steady),
        "max_allocated_gb": max((m["max_allocated_gb"] for m in memory), default=None),
        "max_reserved_gb": max((m["max_reserved_gb"] for m in memory), default=None),
        "first_loss": rows[0]["loss"],
        "final_loss": rows[-1]["loss"],
    }


def combine(runs: list[dict]) -> dict | None:
    """The figures of one variant from all its repeats: the median of the runs' medians, percentiles over all
    their rows, the most memory of any run. Runs that failed have no measurement; None if all did."""
    good = [run for run in runs if run["measurement"]]
    if not good:
        return None
    measurements = [run["measurement"] for run in good]
    return {
        "runs": len(good),
        "rows": sum(m["rows"] for m in measurements),
        **{name: spread([m[name] for m in measurements]) for name in SERIES},
        "first_step_s": statistics.median(m["first_step_s"] for m in measurements),
        "max_allocated_gb": _most([m["max_allocated_gb"] for m in measurements]),
        "max_reserved_gb": _most([m["max_reserved_gb"] for m in measurements]),
        "mfu_reason": next((m["mfu_reason"] for m in measurements if m["mfu_reason"]), None),
        "gpu_reason": next((m["gpu_reason"] for m in measurements if m["gpu_reason"]), None),
    }


def spread(series: list[list[float]]) -> dict | None:
    """Median of the runs' medians, 10th and 90th percentile of all values; None if there are no values."""
    series = [values for values in series if values]
    found = percentiles.spread([value for values in series for value in values])
    if found is None:
        return None
    medians = [statistics.median(values) for values in series]
    return {**found, "median": statistics.median(medians)}


def relate(entries: list[Entry]) -> None:
    """Adds to each result its speed relative to the best of its peers and to its ceiling, both per GPU."""
    results = {entry.name: entry.result for entry in entries}
    for entry in entries:
        result = entry.result
        if entry.kind == "roofline" or not result:
            continue
        rate = result["tokens_per_sec_per_gpu"]["median"]
        peers = {name: found for name in entry.peers if (found := results.get(name))}
        rates = {name: found["tokens_per_sec_per_gpu"]["median"] for name, found in peers.items()}
        best = max(rates, key=lambda name: rates[name], default=None)
        ceiling = results.get(entry.roofline) if entry.roofline else None
        result["times_peers"] = {name: rate / of_peer for name, of_peer in rates.items()}
        result["best_peer"], result["times_peer"] = best, rate / rates[best] if best else None
        result["ceiling_percent"] = 100 * rate / ceiling["ceiling"]["tokens_per_sec"] if ceiling else None


def mean_and_deviation(values: list[float]) -> tuple[float, float | None] | None:
    """Over seeds. None without values."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return (statistics.mean(values), spread) if values else None


def _most(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
