"""Says what ran and what was measured, as rows of a table with a column for each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from common.text import one_line, shorten
from plots import run_record
from plots.comparison_text import throttle_text
from plots.page_panels import event_text
from plots.run_record import Run, number

CELL = 300  # characters of a cell
MOST_EVENTS = 100  # of a run in the list of events
NOTHING = "–"


def tables(runs: list[Run]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """[(title, [(name, a text for each run)])], without the rows that no run has."""
    found = []
    for title, rows in TABLES.items():
        texts = [(name, [shorten(of(run), CELL) or NOTHING for run in runs]) for name, of in rows.items()]
        found.append((title, [(name, cells) for name, cells in texts if set(cells) != {NOTHING}]))
    return found


def tiles(run: Run) -> list[tuple[str, str, str, str]]:
    """The figures of a single run that are seen first: (name, value, unit, detail)."""
    found = []
    for name, column, form, unit in (
        ("MFU", "mfu_percent", ".2f", "%"),
        ("Throughput", "tokens_per_sec", ",.0f", "tokens/s"),
        ("Step time", "time_ms", ",.1f", "ms"),
    ):
        spread = run_record.spread(run, column)
        if spread:
            value, low, high = (shorten(format(each, form), 16) for each in spread)
            of_what = "of a measured peak; " if name == "MFU" and run.measured_peak else ""
            found.append((name, value, unit, f"{of_what}median; p10 to p90: {low} to {high}"))
    if run.best_val_loss is not None:
        found.append(("Validation loss", loss(run.best_val_loss), "", "lowest; nats per token"))
    elif run.final_loss is not None:
        found.append(("Training loss", loss(run.final_loss), "", "last row; nats per token"))
    return found


def course(run: Run) -> str:
    """Status, start and length in a line."""
    started = one_line(str(run.record.get("start_time") or ""))
    return ", ".join(part for part in (run.status, started and f"started {started}", trained(run)) if part)


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


# --- cells ---


def fact(run: Run, *names: str) -> Any:
    """What startup_info holds under these names; None if it does not."""
    value: Any = run.startup
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text(run: Run, *names: str) -> str:
    value = fact(run, *names)
    return one_line(str(value), CELL) if isinstance(value, (str, int, float)) else ""


def joined(facts: Any) -> str:
    """'torch 2.11.0, cuda 13.0' of a dict; an empty text of anything else."""
    known = facts.items() if isinstance(facts, dict) else ()
    return one_line(", ".join(f"{name} {value}" for name, value in known if value is not None), CELL)


def model(run: Run) -> str:
    """Architecture and size."""
    arch = fact(run, "model", "architecture")
    shape = arch if isinstance(arch, dict) else {}
    name = one_line(str(shape["arch"]), 30) if "arch" in shape else ""
    size = run.model.rpartition(", ")[2] if "parameters" in run.model else ""
    return ", ".join(part for part in (name, size) if part) if name else run.model


def shape(run: Run) -> str:
    arch = fact(run, "model", "architecture")
    known = arch if isinstance(arch, dict) else {}
    names = {
        "n_layer": "layers",
        "n_embd": "width",
        "n_head": "heads",
        "n_kv_head": "key/value heads",
        "d_ff": "feed-forward",
        "vocab_size": "vocabulary",
        "block_size": "context",
    }
    numbers = {name: number(known.get(key)) for key, name in names.items()}
    return ", ".join(f"{value:,.0f} {name}" for name, value in numbers.items() if value is not None)


def precision(run: Run) -> str:
    low = fact(run, "low_precision")
    known = low if isinstance(low, dict) else {}
    recipe = [one_line(str(known[key]), 40) for key in ("scope", "executed") if known.get(key)]
    return ", ".join([run.precision, *recipe])


def batch(run: Run) -> str:
    return f"{run.tokens_per_iter:,.0f} tokens" if run.tokens_per_iter else ""


def commit(run: Run) -> str:
    known = text(run, "git", "commit")[:12]
    return f"{known}, modified" if known and fact(run, "git", "modified") else known


def formula(run: Run) -> str:
    return " and ".join(run.mfu_methods) or f"no MFU: {run.why_no_mfu}"


def peak(run: Run) -> str:
    tflops = run.peak_tflops_per_gpu
    sparse = ", 2:4 sparse" if run.sparse else ""
    return f"{tflops:,.5g} TFLOPS per GPU{sparse}" if tflops else ""


def data(run: Run) -> str:
    tokens = fact(run, "data", "tokens", "train")
    known = f"{tokens:,} training tokens" if isinstance(tokens, int) and abs(tokens) < 10**18 else ""
    fingerprint = text(run, "data", "fingerprint")[:12]
    return ", ".join(part for part in (known, fingerprint and f"fingerprint {fingerprint}") if part)


def trained(run: Run) -> str:
    iters = run_record.finite(run.columns["iter"])
    if not len(iters):
        return ""
    made = iters.max() + 1
    tokens = f", {made * run.tokens_per_iter:,.0f} tokens" if run.tokens_per_iter else ""
    return f"{made:,.0f} iterations{tokens}"


def median(column: str, form: str) -> Callable[[Run], str]:
    """'59,621 (59,500 to 59,700)': the median and the 10th and 90th percentile of the timed rows."""

    def cell(run: Run) -> str:
        spread = run_record.spread(run, column)
        if spread is None:
            return ""
        value, low, high = (shorten(format(each, form), 24) for each in spread)
        return f"{value} ({low} to {high})"

    return cell


def memory(run: Run) -> str:
    known = run_record.finite(np.fmax(run.columns["max_allocated_gb"], run.columns["allocated_gb"]))
    return f"{known.max():,.2f}" if len(known) else ""


def loss(value: float | None) -> str:
    return "" if value is None else shorten(f"{value:.4f}", 24)


TABLES: dict[str, dict[str, Callable[[Run], str]]] = {
    "Measured": {
        "MFU, %": median("mfu_percent", ".2f"),
        "MFU, causal, %": median("mfu_causal_percent", ".2f"),
        "tokens/s, all GPUs": median("tokens_per_sec", ",.0f"),
        "step time, ms": median("time_ms", ",.1f"),
        "peak memory, GiB per GPU": memory,
        "validation loss, lowest": lambda run: loss(run.best_val_loss),
        "training loss, last row": lambda run: loss(run.final_loss),
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
        "model": model,
        "shape": shape,
        "GPUs": lambda run: run.machine,
        "strategy": lambda run: text(run, "hardware", "parallelism"),
        "precision": precision,
        "attention": lambda run: text(run, "attention", "line"),
        "optimizer": lambda run: text(run, "optimizer", "type"),
        "an iteration": batch,
        "data": data,
        "MFU formula": formula,
        "peak": peak,
        "source of the peak": lambda run: text(run, "hardware", "peak", "source"),
        "versions": lambda run: joined(fact(run, "software")),
        "commit": commit,
    },
}
