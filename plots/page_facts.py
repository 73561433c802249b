"""Says what ran and what was measured, as rows of a table with a column for each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.text import one_line, shorten
from plots import run_record
from plots.comparison_text import loss_text, memory_text, throttle_text
from plots.run_record import Run

CELL = 300  # characters of a cell
MOST_EVENTS = 100  # of a run in the list of events
NOTHING = "–"


def tables(runs: list[Run]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """[(title, [(name, a text for each run)])], without the rows that no run has."""
    found = []
    for title, rows in TABLES.items():
        texts = [(name, [shorten(of(run), CELL) or NOTHING for run in runs]) for name, of in rows.items()]
        found.append((title, [(name, cells) for name, cells in texts if not set(cells) <= {NOTHING, "-"}]))
    return found


def settings(run: Run) -> list[tuple[str, str]]:
    return [(one_line(name, 60), one_line(str(value), 200)) for name, value in sorted(run.config.items())]


def event_rows(runs: list[Run], names: list[str]) -> tuple[list[tuple[str, str, str, str]], int]:
    """(run, iteration, time, what happened) of anomalies and attempts, and how many more there are."""
    found, more = [], 0
    for run, name in zip(runs, names, strict=True):
        events = run_record.entries(run, "events")
        listed = [(at, one_line(str(event.get("time") or "")), event_text(event)) for at, event in events]
        listed += [(start, "", "resumed") for start in run.attempt_starts]
        listed.sort(key=lambda row: row[0])
        more += max(0, len(listed) - MOST_EVENTS)
        found += [(name, f"{at:,.0f}", when, what) for at, when, what in listed[:MOST_EVENTS]]
    return found, more


def event_text(event: dict[str, Any]) -> str:
    """The kind of an event, and its message if it has one."""
    kind = one_line(str(event.get("kind") or "event")).replace("_", " ")
    return one_line(f"{kind}: {event['message']}", 200) if event.get("message") else kind


# --- cells ---


def fact(*names: str) -> Callable[[Run], str]:
    """What startup_info holds under these names: a value, or 'torch 2.11.0, cuda 13.0' of several."""

    def cell(run: Run) -> str:
        value: Any = run.startup
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, dict):
            value = ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
        return one_line(str(value), CELL) if isinstance(value, (str, int, float)) else ""

    return cell


def median(column: str, form: str) -> Callable[[Run], str]:
    """'59,621 (59,500 to 59,700)': the median and the 10th and 90th percentile of the timed rows."""

    def cell(run: Run) -> str:
        spread = run_record.spread(run, column)
        if spread is None:
            return ""
        value, low, high = (shorten(format(each, form), 24) for each in spread)
        return f"{value} ({low} to {high})"

    return cell


def batch(run: Run) -> str:
    return f"{run.tokens_per_iter:,.0f} tokens" if run.tokens_per_iter else ""


def peak(run: Run) -> str:
    kind = ", 2:4 sparse" * run.sparse + ", measured" * run.measured_peak
    return f"{run.peak_tflops_per_gpu:,.5g} TFLOPS per GPU{kind}" if run.peak_tflops_per_gpu else ""


def commit(run: Run) -> str:
    known = fact("git", "commit")(run)[:12]
    return known + ", modified" * (fact("git", "modified")(run) == "True") if known else ""


def trained(run: Run) -> str:
    iters = run_record.finite(run.columns["iter"])
    if not len(iters):
        return ""
    made = iters.max() + 1
    tokens = f", {made * run.tokens_per_iter:,.0f} tokens" if run.tokens_per_iter else ""
    return f"{made:,.0f} iterations{tokens}"


TABLES: dict[str, dict[str, Callable[[Run], str]]] = {
    "Measured": {
        "MFU, %": median("mfu_percent", ".2f"),
        "MFU, causal, %": median("mfu_causal_percent", ".2f"),
        "tokens/s, all GPUs": median("tokens_per_sec", ",.0f"),
        "step time, ms": median("time_ms", ",.1f"),
        "peak memory, GiB per GPU": memory_text,
        "validation loss, lowest": lambda run: loss_text(run.best_val_loss),
        "training loss, last row": lambda run: loss_text(run.final_loss),
        "SM clock, MHz": median("sm_clock_mhz", ",.0f"),
        "power, W per GPU": median("power_w", ",.0f"),
        "temperature, °C": median("temperature_c", ",.0f"),
        "clock lowered by": throttle_text,
        "rows in the medians": lambda run: f"{int(run.timed.sum()):,} of {len(run.timed):,}",
    },
    "What ran": {
        "status": lambda run: run.status,
        "started": lambda run: one_line(str(run.record.get("start_time") or "")),
        "trained for, by the last row": trained,
        "model": lambda run: run.model,
        "shape": fact("model", "architecture"),
        "GPUs": lambda run: run.machine,
        "strategy": fact("hardware", "parallelism"),
        "precision": lambda run: run.precision,
        "attention": fact("attention", "line"),
        "optimizer": fact("optimizer", "type"),
        "an iteration": batch,
        "data": fact("data", "fingerprint"),
        "training tokens": fact("data", "tokens", "train"),
        "MFU formula": lambda run: " and ".join(run.mfu_methods) or f"no MFU: {run.why_no_mfu}",
        "peak": peak,
        "source of the peak": fact("hardware", "peak", "source"),
        "versions": fact("software"),
        "commit": commit,
    },
}
