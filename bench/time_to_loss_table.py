"""A run of the reference experiment, and what all of them say: the table, and sentences."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plan import Entry
from bench.runner import mean_and_deviation
from bench.table import cell, heading, table_of
from common.json_file import read_json
from common.run_records import run_records
from common.time_to_loss import Progress, Reached

BASELINE = "adamw"  # its mean final loss is the target
NO_RATE = "no short run ended with a loss, so no learning rate is known"
# {column: format of its numbers, '' for text}
COLUMNS = {"variant": "", "learning rate": "g", "final loss": ".4f", "iterations": ".0f", "M tokens": ".2f"}
COLUMNS |= {"training s": ".1f", "GPU-hours": ".4f", "of AdamW's tokens": ".3f", "of its time": ".3f"}
COLUMNS |= {"tokens/s": ",.0f", "optimizer ms": ".2f", "note": ""}
LEGEND = (
    "Target: AdamW's mean final held-out loss in bf16; AdamW's own row is its whole run. Seconds: of\n"
    "iterations alone. Means and standard deviations over seeds."
)
ABOUT = (
    "- Target: {:.4f}. A run has {:.1f} M tokens of {data} in {:,.0f} iterations, {ratio:.2f} for each "
    "parameter. So few flatter Muon: at 20 the literature has 1.3 to 1.5 times at this size, 1.1 at 1.2 B "
    "(Wen et al. 2025, arXiv 2509.02046)."
)


@dataclass(eq=False)
class Run:
    """A training: with a seed, of the table; without one, for the choice of a learning rate."""

    variant: str
    rate: float
    seed: int | None
    entry: Entry
    out_dir: Path | None = None  # once it is done

    @property
    def reason(self) -> str | None:
        """Why it failed."""
        return self.entry.runs[-1]["reason"] if self.entry.runs else None

    @property
    def loss(self) -> float | None:
        """The held-out one after the last iteration: infinite if it failed, None if it was not run yet."""
        if self.entry.result:
            return self.entry.facts["evaluations"][-1]["val_loss"]
        return math.inf if self.reason else None

    @functools.cached_property
    def record(self) -> dict:
        assert self.out_dir, self.entry.name
        return read_json(max(run_records(self.out_dir)))

    @functools.cached_property
    def progress(self) -> Progress:
        return Progress(self.record)


def table_rows(variants: list[str], runs: list[Run]) -> list[dict[str, Any]]:
    """{column: value} of each variant, for the table, and more. Over seeds a value is (mean, deviation); what
    was not measured is None."""
    baseline = [run for run in runs if run.variant == BASELINE and run.entry.result]
    target = statistics.mean([run.loss or 0 for run in baseline] or [math.nan])
    whole = [run.progress.at_last_evaluation() for run in baseline]
    rows = []
    for name in variants:
        own = [run for run in runs if run.variant == name]
        nothing = {"note": NO_RATE if runs else "runs still to be done: all"}
        rows.append({"variant": name, **figures(own, target, whole), **({} if own else nothing)})
    return rows


def figures(own: list[Run], target: float, whole: list[Reached]) -> dict[str, Any]:
    """Of the runs of a variant. `whole`: the ends of AdamW's own. Its seeds lie around their mean, so what it
    needs for the target is its whole run."""
    done = [run for run in own if run.entry.result]
    reached = {run.seed: run.progress.reached(target) for run in done if whole}
    never = [seed for seed, at in reached.items() if at is None]
    found = (
        whole if done and done[0].variant == BASELINE else [] if never else [*filter(None, reached.values())]
    )
    tokens = [at.tokens or math.nan for at in found]
    most_tokens, most_seconds = (
        statistics.mean([getattr(at, name) or math.nan for at in whole] or [math.nan])
        for name in ("tokens", "training_seconds")
    )
    by_seed = {
        "final loss": [run.loss or 0 for run in done],
        "iterations": [at.iteration for at in found],
        "M tokens": [count / 1e6 for count in tokens],
        "training s": [at.training_seconds for at in found],
        "GPU-hours": [at.gpu_hours for at in found],
        "of AdamW's tokens": [count / most_tokens for count in tokens],
        "of its time": [at.training_seconds / most_seconds for at in found],
        "tokens/s": [run.entry.result["tokens_per_sec"]["median"] for run in done if run.entry.result],
    }
    rows = [row for run in done for row in run.record["training_iterations"][1:]]
    milliseconds = [row["optimizer_ms"] for row in rows if row.get("optimizer_ms") is not None]
    said = [f"seed {run.seed} failed: {run.reason}" for run in own if run.reason]
    said += [f"ends above the target with seed {', '.join(map(str, never))}"] * bool(never)
    low = (done[0].entry.facts["low_precision"] if done else None) or {}
    said += ["fp8 is emulated"] * (not low.get("native", True))
    waiting = sum(run.loss is None for run in own)
    said += [f"runs still to be done: {waiting}"] * bool(waiting)
    return {
        **{column: mean_and_deviation(values) for column, values in by_seed.items()},
        "learning rate": own[0].rate if own else None,
        "optimizer ms": statistics.median(milliseconds) if milliseconds else None,
        "note": "; ".join(said),
        "target": target if whole else None,
        "losses": {str(run.seed): run.loss for run in done},
        "never": never,
        "token ratios": by_seed["of AdamW's tokens"],
        "time ratios": by_seed["of its time"],
    }


# --- in words ---


def verdict(row: dict[str, Any]) -> str:
    """What a row says of a variant against AdamW in bf16, also if that is nothing good."""
    name, ratios, never = row["variant"], row.get("time ratios"), len(row["never"])
    if never:
        of = len(row["losses"])
        return f"{name} does not reach AdamW's final loss with {never} of {of} seeds: it does not win."
    if not ratios:
        return f"{name}: there is nothing to compare yet."
    wins = "it wins" if max(ratios) < 1 else "it does not win" if min(ratios) >= 1 else "seeds disagree"
    tokens, seconds = (cell(row[column], ".3f") for column in ("of AdamW's tokens", "of its time"))
    return f"{name} reaches AdamW's final loss in {tokens} of the tokens and {seconds} of the time: {wins}."


def rate_line(name: str, runs: list[Run]) -> str:
    """The losses of a grid."""
    known = {run.rate: run.loss for run in runs if run.loss is not None}
    best = min(known.values(), default=math.inf)
    texts = [
        f"{rate:g}: " + (f"{loss:.4f}" + " (best)" * (loss == best) if loss < math.inf else "failed")
        for rate, loss in known.items()
    ]
    texts += dict.fromkeys(f"failed: {run.reason}" for run in runs if run.reason)
    return f"- {name}, held-out loss of short runs by learning rate: {'; '.join(texts)}"


def document_lines(content: dict, rows: list[dict[str, Any]], short: list[Run], full: list[Run]) -> list[str]:
    done = [run for run in [*full, *short] if run.entry.result]
    lines = heading(content, "time to loss", done[0].entry.facts if done else {})
    for name in dict.fromkeys(run.variant for run in short):
        lines.append(rate_line(name, [run for run in short if run.variant == name]))
    lines += ["", *table_of(COLUMNS, rows, ("variant", "note")), ""]
    lines += [f"- {verdict(row)}" for row in rows if row["variant"] != BASELINE]
    if done and done[0].seed is not None and rows[0]["target"]:
        facts, at = done[0].entry.facts, done[0].progress.at_last_evaluation()
        tokens = at.tokens or 0.0
        about = {"data": facts["config"]["dataset"], "ratio": tokens / facts["parameters"]}
        lines.append(ABOUT.format(rows[0]["target"], tokens / 1e6, at.iteration, **about))
    return [*lines, "", LEGEND]
