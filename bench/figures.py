"""The figures of runs: of one from its rows, of a variant from its runs, and of a variant beside others.

Rows are the training_iterations of a run record; bench.peer prints rows of the same form. The first row is
the first iteration, which includes compilation. Of the others only those count that begin after the warm-up.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from bench.plan import Entry
from training.hardware.nvml import FIELDS
from training.records import percentiles
from training.records.machine import known, missing_reason

MFUS = ("mfu_percent", "mfu_causal_percent", "mfu_fp8_percent")  # the last: native fp8, peak known
SERIES = (*MFUS, "tokens_per_sec", "tokens_per_sec_per_gpu", "time_ms", *FIELDS)
MOST = ("max_allocated_gb", "max_reserved_gb")  # None on a CPU


def measure(rows: list[dict], warmup: int) -> dict:
    """The figures of one run. SERIES are lists with one value for each row that has it. Raises ValueError if
    no row counts."""
    if not rows:
        raise ValueError("the run has no rows")
    last_before = [-1, *(row["iter"] for row in rows)]  # the last iteration before each row
    steady = [row for row, last in zip(rows, last_before, strict=False) if last >= warmup]
    if not steady:
        raise ValueError(f"no row begins after {warmup} iterations of warm-up; use more --iters")
    flat = [row | (row["mfu"] or {}) for row in steady]
    memory = [row["memory"] for row in rows if row["memory"]]
    series: dict[str, Any] = {name: known(flat, name) for name in SERIES}
    return {
        "first_step_s": rows[0]["time_ms"] / 1000,
        "rows": len(steady),
        **series,
        "mfu_reason": None if series["mfu_percent"] else steady[-1]["mfu_reason"],
        "gpu_reason": missing_reason(steady),
        **{name: max((each[name] for each in memory), default=None) for name in MOST},
        "first_loss": rows[0]["loss"],
        "final_loss": rows[-1]["loss"],
    }


def combine(runs: list[dict]) -> dict | None:
    """The figures of one variant from all its repeats: medians and percentiles over all their rows, the most
    memory of any run. Runs that failed have no measurement; None if all did."""
    measurements: list[Any] = known(runs, "measurement")
    if not measurements:
        return None
    of: dict[str, Any] = {name: known(measurements, name) for name in measurements[0]}
    return {
        "runs": len(measurements),
        "rows": sum(of["rows"]),
        **{name: percentiles.spread([*itertools.chain(*of[name])]) for name in SERIES},
        "first_step_s": statistics.median(of["first_step_s"]),
        **{name: max(of[name], default=None) for name in MOST},
        **{name: next(iter(of[name]), None) for name in ("mfu_reason", "gpu_reason")},
    }


def relate(entries: list[Entry]) -> None:
    """Adds to each result its speed relative to the best of its peers and to its ceiling, both per GPU."""
    rates = {entry.name: rate for entry in entries if (rate := figures([entry])["per GPU"])}
    for entry in entries:
        if entry.kind == "roofline" or not entry.result:
            continue
        times = {name: rates[entry.name] / rates[name] for name in entry.peers if name in rates}
        best = min(times, key=lambda name: times[name], default=None)
        ceiling = rates.get(entry.roofline or "")
        entry.result |= {"times_peers": times, "best_peer": best, "times_peer": best and times[best]}
        entry.result["ceiling_percent"] = ceiling and 100 * rates[entry.name] / ceiling


# --- a row of a table ---

# {column: field of a result}
FIGURES = {"tokens/s": "tokens_per_sec", "per GPU": "tokens_per_sec_per_gpu", "x peer": "times_peer"}
FIGURES |= {"MFU %": "mfu_percent", "causal %": "mfu_causal_percent", "of fp8 %": "mfu_fp8_percent"}
FIGURES |= {"of ceiling %": "ceiling_percent", "peak GiB": "max_allocated_gb"}
FIGURES |= {"reserved": "max_reserved_gb", "first step s": "first_step_s"}
FIGURES |= {"SM MHz": "sm_clock_mhz", "W": "power_w"}


def figures(runs: Sequence[Entry]) -> dict[str, Any]:
    """{column: value} of the entries of a row, which differ in their seed; what was not measured is None."""
    results = [run.result | run.result.get("ceiling", {}) for run in runs if run.result]
    losses = [run.facts["evaluations"][-1]["val_loss"] for run in runs if run.facts.get("evaluations")]
    found = {column: summary([result.get(name) for result in results]) for column, name in FIGURES.items()}
    return {**found, "held-out loss": summary(losses), "note": note(runs)}


def summary(values: Sequence[Any]) -> Any:
    """A figure of one run; the mean and the standard deviation of those of several. None without values."""
    medians = [value["median"] if isinstance(value, dict) else value for value in values]
    known = [value for value in medians if value is not None]
    if len(known) > 1:
        return statistics.mean(known), statistics.stdev(known)
    return known[0] if known else None


def note(runs: Sequence[Entry]) -> str:
    """Why a row lacks figures, or in what it differs from what was asked for."""
    said: list[str | None] = [] if any(run.runs for run in runs) else ["not run"]
    failed: dict[str, list[str]] = {}
    for run in runs:
        result = run.result or {}
        said += [*run.facts.get("fallbacks", []), result.get("mfu_reason")]
        said += [result.get("gpu_reason")] * (run.device == "cuda")
        for reason in run.failures:
            failed.setdefault(reason, []).append(run.name)
    said += [f"{', '.join(names)} failed: {reason}" for reason, names in failed.items()]
    return "; ".join(dict.fromkeys(filter(None, said)))
