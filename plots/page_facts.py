"""Says what ran and what was measured, as rows of a table with a column for each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.arguments import target_losses
from common.text import one_line, shorten
from plots import run_record
from plots.comparison_text import last_loss, median_text, memory, p10_to_p90, text_of, val_loss
from plots.run_record import Run

CELL = 300  # characters of a cell


def tables(runs: list[Run]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """[(title, [(name, a text for each run)])], without the rows that no run has."""
    found = []
    for title, rows in TABLES.items():
        texts = [(name, [shorten(of(run), CELL) or "-" for run in runs]) for name, of in rows.items()]
        found.append((title, [(name, cells) for name, cells in texts if {*cells} != {"-"}]))
    return found


def losses(runs: list[Run], names: list[str]) -> list[list[str]]:
    """What runs took to their loss_targets, or to their best held-out loss: a row of texts for each, after a
    first one with their names."""
    rows: list[list[str]] = []
    head = ["validation loss", "iteration", "training time", "wall clock", "tokens", "FLOPs", "GPU-hours"]
    for run, name in zip(runs, names, strict=True):
        progress = run.progress
        if progress is None or not progress.evaluations:
            continue
        try:
            targets = target_losses(str(run.config.get("loss_targets") or ""))
        except ValueError:
            targets = []
        for loss in targets or [min(step.loss for step in progress.evaluations)]:
            reached = progress.reached(loss)
            texts = list(reached.texts.values()) if reached else ["not reached", *["-"] * (len(head) - 2)]
            rows.append([name, f"{loss:g}" if targets else f"{loss:.4f}, the best", *texts])
    rows = [["run", *head], *rows] if rows else []
    return [[shorten(text, CELL) for text in row[len(runs) == 1 :]] for row in rows]


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
        value = median_text(run, column, form)
        return "-" if value == "-" else f"{shorten(value, 24)} ({p10_to_p90(run, column, form)})"

    return cell


TABLES: dict[str, dict[str, Callable[[Run], str]]] = {
    "Measured": {
        "MFU, %": median("mfu_percent", ".2f"),
        "MFU, causal, %": median("mfu_causal_percent", ".2f"),
        "tokens/s, all GPUs": median("tokens_per_sec", ",.0f"),
        "step time, ms": median("time_ms", ",.1f"),
        "peak memory, GiB per GPU": memory,
        "validation loss, lowest": val_loss,
        "training loss, last row": last_loss,
        "SM clock, MHz": median("sm_clock_mhz", ",.0f"),
        "power, W per GPU": median("power_w", ",.0f"),
        "temperature, °C": median("temperature_c", ",.0f"),
        "clock lowered by": run_record.throttled,
        "rows in the medians": lambda run: f"{int(run.timed.sum()):,} of {len(run.timed):,}",
    },
    "What ran": {
        "status": lambda run: run.status,
        "started": lambda run: one_line(str(run.record.get("start_time") or "")),
        "iteration of the last row": lambda run: text_of(run_record.finite(run.columns["iter"])[-1:], ",.0f"),
        "model": lambda run: run.model,
        "shape": fact("model", "architecture"),
        "GPUs": lambda run: run.machine,
        "strategy": fact("hardware", "parallelism"),
        "precision": lambda run: run.precision,
        "attention": fact("attention", "line"),
        "optimizer": fact("optimizer", "type"),
        "an iteration": lambda run: f"{run.tokens_per_iter:,.0f} tokens" if run.tokens_per_iter else "",
        "data": fact("data", "fingerprint"),
        "training tokens": fact("data", "tokens", "train"),
        "MFU formula": lambda run: " and ".join(run.mfu_methods) or f"no MFU: {run.why_no_mfu}",
        "peak": lambda run: run.peak,
        "source of the peak": fact("hardware", "peak", "source"),
        "versions": fact("software"),
        "code": fact("git"),
    },
}
