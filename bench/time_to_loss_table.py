"""The results of the reference experiment: the table, and what it says in plain words."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.plan import Entry
from bench.precision_table import cell, mean_and_deviation
from bench.table import heading
from common.durable_file import write_bytes, write_json
from common.json_file import read_json
from common.run_records import run_records
from common.text import aligned
from common.time_to_loss import Progress, Reached

BASELINE = "adamw"  # its mean final loss is the target
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


# --- the figures ---


def table_rows(variants: list[str], runs: list[Run]) -> list[dict[str, Any]]:
    """{column: value} of each variant, for the table, and more. Over seeds a value is (mean, deviation); what
    was not measured is None."""
    finished = {name: [run for run in runs if run.variant == name and run.entry.result] for name in variants}
    target = statistics.mean([run.loss or 0 for run in finished[BASELINE]] or [math.nan])
    whole = [run.progress.at_last_evaluation() for run in finished[BASELINE]]
    rows = []
    for name, done in finished.items():
        own = [run for run in runs if run.variant == name]
        row: dict[str, Any] = {**dict.fromkeys(COLUMNS), "variant": name, "target": target if whole else None}
        row |= of_whole_runs(done) | {"learning rate": own[0].rate if own else None}
        found = {run.seed: run.progress.reached(target) for run in done if whole}
        row["never"] = [seed for seed, at in found.items() if at is None]
        # AdamW's own seeds lie around their mean: what it needs is its whole run
        reached = whole if name == BASELINE else [at for at in found.values() if at]
        if reached and len(reached) == len(found):
            row |= needed(reached, whole)
        said = [f"seed {run.seed} failed: {run.reason}" for run in own if run.reason]
        if row["never"]:
            said.append(f"ends above the target with seed {', '.join(map(str, row['never']))}")
        low = (done[0].entry.facts["low_precision"] if done else None) or {}
        said += ["fp8 is emulated"] * (not low.get("native", True))
        waiting = sum(run.loss is None for run in own)
        if runs and not own:
            said.append("no short run ended with a loss, so no learning rate is known")
        elif waiting or not own:
            said.append(f"runs still to be done: {waiting or 'all'}")
        rows.append(row | {"note": "; ".join(said).replace("|", "/")})
    return rows


def of_whole_runs(done: list[Run]) -> dict[str, Any]:
    """What the runs of a variant have, whether they reached the target or not."""
    rates = [run.entry.result["tokens_per_sec"]["median"] for run in done if run.entry.result]
    rows = [row for run in done for row in run.record["training_iterations"][1:]]
    milliseconds = [row["optimizer_ms"] for row in rows if row.get("optimizer_ms") is not None]
    return {
        "losses": {str(run.seed): run.loss for run in done},
        "final loss": mean_and_deviation([run.loss or 0 for run in done]),
        "tokens/s": mean_and_deviation(rates),
        "optimizer ms": statistics.median(milliseconds) if milliseconds else None,
    }


def needed(found: list[Reached], whole: list[Reached]) -> dict[str, Any]:
    """What the target took, also as ratios to AdamW's whole run."""
    most_tokens = statistics.mean(at.tokens or 0.0 for at in whole)
    most_seconds = statistics.mean(at.training_seconds for at in whole)
    ratios = {
        "token ratios": [(at.tokens or 0.0) / most_tokens for at in found],
        "time ratios": [at.training_seconds / most_seconds for at in found],
    }
    return {
        "iterations": mean_and_deviation([at.iteration for at in found]),
        "M tokens": mean_and_deviation([(at.tokens or 0.0) / 1e6 for at in found]),
        "training s": mean_and_deviation([at.training_seconds for at in found]),
        "GPU-hours": mean_and_deviation([at.gpu_hours for at in found]),
        "of AdamW's tokens": mean_and_deviation(ratios["token ratios"]),
        "of its time": mean_and_deviation(ratios["time ratios"]),
        **ratios,
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


def save_results(
    folder: Path, content: dict, variants: list[str], short: list[Run], full: list[Run]
) -> list[str]:
    """Writes results.json with everything and table.md, whose lines it returns."""
    rows, done = table_rows(variants, full), [run for run in [*full, *short] if run.entry.result]
    lines = heading(content, "time to loss", done[0].entry.facts if done else {})
    for name in dict.fromkeys(run.variant for run in short):
        lines.append(rate_line(name, [run for run in short if run.variant == name]))
    texts = [[cell(row[name], form) for name, form in COLUMNS.items()] for row in rows]
    lines += ["", *aligned(list(COLUMNS), texts, ("variant", "note"), "github"), ""]
    lines += [f"- {verdict(row)}" for row in rows if row["variant"] != BASELINE]
    if done and done[0].seed is not None and rows[0]["target"]:
        facts, at = done[0].entry.facts, done[0].progress.at_last_evaluation()
        tokens = at.tokens or 0.0
        about = {"data": facts["config"]["dataset"], "ratio": tokens / facts["parameters"]}
        lines.append(ABOUT.format(rows[0]["target"], tokens / 1e6, at.iteration, **about))
    lines += ["", LEGEND]
    runs = [dataclasses.asdict(run) | {"out_dir": str(run.out_dir)} for run in [*short, *full]]
    write_json(folder / "results.json", {**content, "rows": rows, "runs": runs})
    write_bytes(folder / "table.md", ("\n".join(lines) + "\n").encode("utf-8"))
    return lines
