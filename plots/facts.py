"""What ran and what was measured, in words: the columns of the table that compare_runs prints, and the rows
of the tables of the page. A cell is the text of a run; '-' or '' if its record does not tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from common.arguments import target_losses
from common.text import one_line, shorten
from plots.run_record import Run, finite, look_up, spread, throttled

CELL = 300  # characters of a cell of the page
Cell = Callable[[Run], str]


def describe(run: Run) -> str:
    peak = f"peak {run.peak}" if run.peak else ""
    mfu = f"MFU by {formulas(run)}" if run.mfu_methods else formulas(run)
    return ", ".join(filter(None, (run.model, run.machine, run.precision, mfu, peak)))


# --- cells ---


def formulas(run: Run) -> str:
    return " and ".join(run.mfu_methods) or f"no MFU: {run.why_no_mfu}"


def median(column: str, form: str) -> Cell:
    """Of the timed rows."""
    return lambda run: format(found[0], form) if (found := spread(run, column)) else "-"


def p10_to_p90(column: str, form: str) -> Cell:
    return lambda run: (
        " to ".join(shorten(format(v, form), 24) for v in (spread(run, column) or ())[1:]) or "-"
    )


def median_and_range(column: str, form: str) -> Cell:
    """'59,621 (59,500 to 59,700)': with the 10th and 90th percentile."""
    middle, ends = median(column, form), p10_to_p90(column, form)
    return lambda run: f"{shorten(middle(run), 24)} ({ends(run)})" if spread(run, column) else "-"


def one_of(column: str, form: str, choose: Callable[[np.ndarray], Any]) -> Cell:
    """What `choose` takes of the values of a column that exist."""
    return lambda run: format(choose(found), form) if len(found := finite(run.columns[column])) else "-"


def recorded(*names: str) -> Cell:
    """What startup_info holds under these names: a value, or 'torch 2.11.0, cuda 13.0' of several."""

    def cell(run: Run) -> str:
        value = look_up(run.startup, *names)
        if isinstance(value, dict):
            value = ", ".join(f"{name} {item}" for name, item in value.items() if item is not None)
        return one_line(str(value), CELL) if isinstance(value, (str, int, float)) else ""

    return cell


def val_loss(run: Run) -> str:
    return "-" if run.best_val_loss is None else f"{run.best_val_loss:.4f}"


last_loss, memory = one_of("loss", ".4f", lambda values: values[-1]), one_of("memory_gb", ".2f", np.max)
GPU = {"sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, °C"}
COLUMNS: dict[str, Cell] = {
    "status": lambda run: run.status.split(" (")[0],
    "loss": last_loss,
    "val loss": val_loss,
    "MFU %": median("mfu_percent", ".2f"),
    "tokens/s": median("tokens_per_sec", ",.0f"),
    "p10 to p90": p10_to_p90("tokens_per_sec", ",.0f"),
    "max GiB": memory,
    "SM MHz": median("sm_clock_mhz", ",.0f"),
    "W": median("power_w", ",.0f"),
}
TABLES: dict[str, dict[str, Cell]] = {
    "Measured": {
        "MFU, %": median_and_range("mfu_percent", ".2f"),
        "MFU, causal, %": median_and_range("mfu_causal_percent", ".2f"),
        "tokens/s, all GPUs": median_and_range("tokens_per_sec", ",.0f"),
        "step time, ms": median_and_range("time_ms", ",.1f"),
        "peak memory, GiB per GPU": memory,
        "validation loss, lowest": val_loss,
        "training loss, last row": last_loss,
        "SM clock, MHz": median_and_range("sm_clock_mhz", ",.0f"),
        "power, W per GPU": median_and_range("power_w", ",.0f"),
        "temperature, °C": median_and_range("temperature_c", ",.0f"),
        "clock lowered by": throttled,
        "rows in the medians": lambda run: f"{int(run.timed.sum()):,} of {len(run.timed):,}",
    },
    "What ran": {
        "status": lambda run: run.status,
        "started": lambda run: one_line(str(run.record.get("start_time") or "")),
        "iteration of the last row": one_of("iter", ",.0f", lambda values: values[-1]),
        "model": lambda run: run.model,
        "shape": recorded("model", "architecture"),
        "GPUs": lambda run: run.machine,
        "strategy": recorded("hardware", "parallelism"),
        "precision": lambda run: run.precision,
        "attention": recorded("attention", "line"),
        "optimizer": recorded("optimizer", "type"),
        "an iteration": lambda run: f"{run.tokens_per_iter:,.0f} tokens" if run.tokens_per_iter else "",
        "data": recorded("data", "fingerprint"),
        "training tokens": recorded("data", "tokens", "train"),
        "MFU formula": formulas,
        "peak": lambda run: run.peak,
        "source of the peak": recorded("hardware", "peak", "source"),
        "versions": recorded("software"),
        "code": recorded("git"),
    },
}


# --- tables ---


def cells(runs: list[Run], table: dict[str, Cell], most: int = CELL) -> dict[str, list[str]]:
    """{name: a text for each run}, without what no run has."""
    texts = {name: [shorten(of(run), most) or "-" for run in runs] for name, of in table.items()}
    return {name: row for name, row in texts.items() if {*row} != {"-"}}


def losses(runs: list[Run], names: list[str]) -> list[list[str]]:
    """What runs took to their loss_targets, or to their best held-out loss: a row of texts for each, after a
    first one with their names."""
    head = ["validation loss", "iteration", "training time", "wall clock", "tokens", "FLOPs", "GPU-hours"]
    rows = [["run", *head]]
    for run, name in zip(runs, names, strict=True):
        if not (progress := run.progress) or not progress.evaluations:
            continue
        try:
            targets = target_losses(str(run.config.get("loss_targets") or ""))
        except ValueError:
            targets = []
        for loss in targets or [min(step.loss for step in progress.evaluations)]:
            reached = progress.reached(loss)
            texts = list(reached.texts.values()) if reached else ["not reached", *["-"] * (len(head) - 2)]
            rows.append([name, f"{loss:g}" if targets else f"{loss:.4f}, the best", *texts])
    return [[shorten(text, CELL) for text in row[len(runs) == 1 :]] for row in rows if len(rows) > 1]
