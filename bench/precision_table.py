"""The table of the precision matrix: the figures of each row, beside the published ones."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from bench.plan import Entry
from bench.precision_rows import BASELINE, HEAD, ROWS, Row, corrected
from bench.results import SERIES
from bench.table import heading
from common.text import aligned

# {column: format of its numbers, '' for text}
COLUMNS = {"row": "", "weights": "", "matmuls": "", "executed as": "", "tokens/s": ",.0f", "MFU %": ".1f"}
COLUMNS |= {
    "causal %": ".1f",
    "of fp8 %": ".1f",
    "peak GiB": ".1f",
    "reserved": ".1f",
    "held-out loss": ".4f",
}
COLUMNS |= {"from row 1 %": "+.2f", "study's tokens/s": ",.0f", "study's MFU %": ".2f", "corrected %": ".1f"}
COLUMNS |= {"its causal %": ".1f", "study's memory %": ".2f", "study's loss": ".4f", "note": ""}
TEXT_COLUMNS = [name for name, form in COLUMNS.items() if not form and name != "row"]
LEGEND = (
    "MFU: v3, of the bf16 peak in every row, with the full matrix of scores; causal: its causal half,\n"
    "inside documents where they are masked; of fp8: of the fp8 peak, native fp8 alone; loss: mean and\n"
    "standard deviation over seeds; from row 1: of the same seed. The study's columns are of one B200, as\n"
    "printed (memory: W&B's, no peak) and with its tokens/s counted as here (docs/low_precision.md)."
)


@dataclass
class Run:
    """A run of a row: of its speed, or of its loss with one seed."""

    phase: str
    row: str
    seed: int | None
    entry: Entry
    settings: str  # what the runs of this phase have in common


def row_figures(runs: list[Run]) -> list[dict[str, Any]]:
    """{column: value} of each row, and its losses and failures; what was not measured is None or empty."""
    losses: dict[str, dict[str, float]] = {name: {} for name in ROWS}
    for run in runs:
        if run.phase == "loss" and run.entry.result:
            losses[run.row][str(run.seed)] = run.entry.facts["evaluations"][-1]["val_loss"]
    return [figures(row, [run for run in runs if run.row == row.name], losses) for row in ROWS.values()]


def figures(row: Row, runs: list[Run], losses: dict[str, dict[str, float]]) -> dict[str, Any]:
    speed: dict = next((run.entry.result for run in runs if run.phase == "speed" and run.entry.result), {})
    facts: dict = next((run.entry.facts for run in runs if run.entry.result), {})
    medians = {name: (speed.get(name) or {}).get("median") for name in SERIES}
    low, own = facts.get("low_precision") or {}, losses[row.name]
    stochastic = " stochastic" * (row.options.get("weight_rounding") == "stochastic")
    found = {
        "row": row.name,
        "weights": {"float32": "fp32", "bfloat16": "bf16"}[row.param_dtype] + stochastic,
        "matmuls": row.low_precision + " and head" * (row.scope == HEAD),
        "executed as": low.get("executed") or ("bf16" if facts and row.low_precision == "none" else None),
        "tokens/s": medians["tokens_per_sec"],
        "MFU %": medians["mfu_percent"],
        "causal %": medians["mfu_causal_percent"],
        "of fp8 %": medians["mfu_fp8_percent"] if low.get("native", True) else None,
        "peak GiB": speed.get("max_allocated_gb"),
        "reserved": speed.get("max_reserved_gb"),
        "held-out loss": mean_and_deviation(list(own.values())),
        "from row 1 %": mean_and_deviation(above_baseline(row, losses)),
        "study's tokens/s": row.published and row.published.tokens_per_sec,
        "study's MFU %": row.published and row.published.mfu_percent,
        "study's memory %": row.published and row.published.memory_percent,
        "study's loss": row.published and row.published.loss,
        "losses": own,
    }
    found["corrected %"], found["its causal %"] = corrected(row) or (None, None)
    found["weight_tying"] = facts.get("config", {}).get("weight_tying", row.weight_tying)
    return {**found, "note": "; ".join(notes(row, runs, found)).replace("|", "/")}


def notes(row: Row, runs: list[Run], found: dict[str, Any]) -> list[str]:
    """Also why runs failed, and what ran otherwise than asked."""
    said = [row.note, "" if found["weight_tying"] else "untied", "" if runs else "not run"]
    for run in runs:
        reason, fallbacks = run.entry.runs[-1]["reason"], run.entry.facts.get("fallbacks", [])
        said += [f"{run.phase} failed: {reason}"] * bool(reason)
        said += [f"{run.phase} ran otherwise: {text}" for text in fallbacks]
    return list(dict.fromkeys(filter(None, said)))


def above_baseline(row: Row, losses: dict[str, dict[str, float]]) -> list[float]:
    """By how much its losses are above those of row 1, in percent, for each seed that both have."""
    own, others = losses[row.name], losses[BASELINE] if row.name != BASELINE else {}
    return [100 * (own[seed] / others[seed] - 1) for seed in own if seed in others]


def mean_and_deviation(values: list[float]) -> tuple[float, float | None] | None:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return (statistics.mean(values), spread) if values else None


def document_lines(content: dict[str, Any], runs: list[Run]) -> list[str]:
    """The saved document: date, machine, versions, settings, the table, failures, what the columns mean."""
    facts: dict = next((run.entry.facts for run in runs if run.entry.facts), {})
    lines = [*heading(content, "precision matrix", facts), *(f"- {text}" for text in content["settings"])]
    if peak := facts.get("hardware", {}).get("peak"):
        lines.append(f"- bf16 peak: {peak['tflops_per_gpu'] or 'unknown'} TFLOPS, {peak['source']}")
    texts = [[cell(row[name], form) for name, form in COLUMNS.items()] for row in content["rows"]]
    return [*lines, "", *aligned(list(COLUMNS), texts, TEXT_COLUMNS, "github"), "", LEGEND]


def cell(value: Any, form: str) -> str:
    mean, spread = value if isinstance(value, tuple) else (value, None)
    text = "" if mean is None else format(mean, form)
    return text if spread is None else f"{text} ± {spread:{form.lstrip('+')}}"
