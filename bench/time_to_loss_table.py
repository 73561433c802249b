"""What the runs of the reference experiment say: the table, and sentences."""

from __future__ import annotations

import math
import statistics
from typing import Any

from bench.figures import figures, note, summary
from bench.plan import Entry
from bench.table import heading, table_of
from common.run_records import load_record, run_records
from common.time_to_loss import Progress
from plots.loss_ratio import reaches
from training.configuration.keys import ROOT

BASELINE = "adamw"  # the others are compared with its final losses
# {column: format}
COLUMNS = {"variant": "", "learning rate": "g", "held-out loss": ".4f", "M tokens": ".2f"}
COLUMNS |= {"training s": ".1f", "GPU-hours": ".4f", "tokens/s": ",.0f", "optimizer ms": ".2f", "note": ""}
LEGEND = (
    "Of whole runs, means and standard deviations over seeds; seconds: of iterations alone. A ratio is over\n"
    "all pairs of runs: what one needs for the other's final held-out loss (docs/bench.md)."
)


def loss(run: Entry) -> float | None:
    """The held-out one after the last iteration: infinite if it failed, None if it was not run yet."""
    if not run.result:
        return math.inf if run.failures else None
    last = run.facts["evaluations"][-1]["val_loss"]
    return math.inf if last is None else last


def table_rows(variants: list[str], runs: list[Entry]) -> list[dict[str, Any]]:
    """{column: value} of each variant, its losses by seed, and what it needs for AdamW's final losses."""
    records = {run.name: record_of(run) for run in runs if run.result}
    progress = {name: Progress(record) for name, record in records.items()}
    rows = []
    for variant in variants:
        own = [run for run in runs if run.about["variant"] == variant]
        base, other = (
            {run.name: progress[run.name] for run in runs if run.about["variant"] == name and run.result}
            for name in (BASELINE, variant)
        )
        ends = [each.at_last_evaluation() for each in other.values()]
        found = [row for name in other for row in records[name]["training_iterations"][1:]]
        milliseconds = [row["optimizer_ms"] for row in found if row.get("optimizer_ms") is not None]
        rows.append(
            {
                **figures(own),
                "variant": variant,
                "learning rate": own[0].about["rate"] if own else None,
                "M tokens": summary([at.tokens and at.tokens / 1e6 for at in ends]),
                "training s": summary([at.training_seconds for at in ends]),
                "GPU-hours": summary([at.gpu_hours for at in ends]),
                "optimizer ms": statistics.median(milliseconds) if milliseconds else None,
                "losses": {str(run.about["seed"]): loss(run) for run in own if run.result},
                "against": reaches(base, other)[0]
                if base and other
                else f"{variant}: nothing to compare yet",
            }
        )
    return rows


def record_of(run: Entry) -> dict[str, Any]:
    return load_record(max(run_records(ROOT / run.runs[-1]["folder"])))


def rate_line(name: str, runs: list[Entry]) -> str:
    """The losses of a grid."""
    losses = {run.about["rate"]: found for run in runs if (found := loss(run)) is not None}
    best = min(losses, key=lambda rate: losses[rate], default=None)
    texts = [f"{rate:g}: {found:.4f}{' (best)' * (rate == best)}" for rate, found in losses.items()]
    if len(losses) == len(runs) and best in (min(losses), max(losses)):
        texts.append(f"the best is at the edge: give a wider --grid='{name}=...'")
    texts += [each] if (each := note(runs)) else []
    return f"- {name}, held-out loss of short runs by learning rate: {'; '.join(texts)}"


def document_lines(content: dict, rows: list[dict[str, Any]], runs: list[Entry]) -> list[str]:
    short = [run for run in runs if run.about["seed"] is None]
    lines = heading(content, "time to loss", runs)
    for name in dict.fromkeys(run.about["variant"] for run in short):
        lines.append(rate_line(name, [run for run in short if run.about["variant"] == name]))
    against = [f"- {row['against']}." for row in rows if row["variant"] != BASELINE]
    return [*lines, "", *table_of(COLUMNS, rows), "", *against, "", LEGEND]
