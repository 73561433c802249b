"""Says which charts the page of plots/report.py has, and what is in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from common.text import one_line
from plots import figure, run_record
from plots.page_chart import Chart, Line, Marker, draw
from plots.run_record import Run

MOST_MARKERS = 100  # of a run and a kind; a chart with more of them shows only these
OF_A_LOSS = "nats per token"
# column: title, unit, format of a number
TIMINGS = {
    "mfu_percent": ("MFU", "%", ".2f"),
    "tokens_per_sec": ("Throughput", "tokens/s, all GPUs", ",.0f"),
    "time_ms": ("Step time", "ms per iteration", ",.1f"),
}
OTHERS = {
    "lr": ("Learning rate", "", ".3e"),
    "grad_norm": ("Gradient norm before clipping", "global L2 norm", ".4g"),
    "sm_clock_mhz": ("SM clock", "MHz, median over the row", ",.0f"),
    "power_w": ("Power", "W per GPU", ",.0f"),
    "temperature_c": ("Temperature", "°C", ",.0f"),
    "max_allocated_gb": ("Peak GPU memory", "GiB", ",.2f"),
}


def panels(runs: list[Run], names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The charts as page.html draws them, and for each that has nothing to show a line that says so."""
    markers = [marker for index, run in enumerate(runs) for marker in happenings(index, run)]
    drawn_losses = [] if run_record.tokenizers_differ(runs) else losses(runs, names)
    charts = [*drawn_losses, *timings(runs, names), *others(runs, names)]
    drawn: list[dict[str, Any]] = []
    missing: list[str] = []
    for chart in charts:
        chart.markers = [] if chart.over_tokens else markers
        if found := draw(chart, x_limits(runs, chart.over_tokens), len(runs)):
            drawn.append(found)
        elif not chart.over_tokens:
            missing.append(chart.title)
    narrow = [chart for chart in drawn if not chart["wide"]]
    if len(narrow) % 2:  # one that is alone in its row takes all of it
        narrow[-1]["wide"] = True
    lines = [f"Not logged: {', '.join(missing)}."] if missing else []
    if "MFU" in missing and len(runs) == 1:
        lines.append(f"No MFU: {runs[0].why_no_mfu}.")
    return drawn, lines


def x_limits(runs: list[Run], over_tokens: bool) -> tuple[float, float]:
    """The same for all charts, so that one moment of the runs is at one place in each of them."""
    found = []
    for run in runs:
        evaluated = [run_record.evaluations(run, f"{name}_loss")[0] for name in ("train", "val")]
        iters = [run.columns["iter"], *evaluated]
        values = run_record.finite(np.concatenate(iters))
        found.append(values * (run.tokens_per_iter or 1) if over_tokens else values)
    points = np.concatenate(found)
    low, high = (float(points.min()), float(points.max())) if len(points) else (0.0, 1.0)
    pad = max(0.02 * (high - low), 0.5, 1e-9 * abs(high))  # an iteration may be any number in a bad record
    return low - pad, high + pad


# --- what happened ---


def happenings(index: int, run: Run) -> list[Marker]:
    """Attempts after the first, anomalies and checkpoints."""
    found = [Marker(index, start - 0.5, "restart", "resumed") for start in run.attempt_starts]
    found += [
        Marker(index, at, "anomaly", event_text(event)) for at, event in run_record.entries(run, "events")
    ][:MOST_MARKERS]
    saved = run_record.entries(run, "checkpoints")
    return found + [Marker(index, at, "checkpoint", "checkpoint") for at, _ in saved[-MOST_MARKERS:]]


def event_text(event: dict[str, Any]) -> str:
    """The kind of an event, and its message if it has one."""
    kind = one_line(str(event.get("kind") or "event")).replace("_", " ")
    return one_line(f"{kind}: {event['message']}", 200) if event.get("message") else kind


# --- the charts ---


def losses(runs: list[Run], names: list[str]) -> Iterator[Chart]:
    """One chart of a single run; of several one for training and one for validation. Over tokens, too, if
    the runs have different numbers of them in an iteration."""
    sizes = [run.tokens_per_iter for run in runs]
    tokens_per_iter = sizes[0] if len(set(sizes)) == 1 else None
    training = [line for index, run in enumerate(runs) for line in training_lines(index, run, names)]
    evaluated = [line for index, run in enumerate(runs) for line in evaluation_lines(index, run, names)]
    charts = [Chart("Loss", OF_A_LOSS, ".4f", training + evaluated, [], wide=True)]
    if len(runs) > 1:
        charts = [
            Chart("Training loss", OF_A_LOSS, ".4f", training, []),
            Chart("Validation loss", OF_A_LOSS, ".4f", evaluated, []),
        ]
    for chart in charts:
        chart.typical = [figure.after_the_beginning(line.x, line.y) for line in chart.lines]
        chart.tokens_per_iter = tokens_per_iter
        if len(runs) > 1 and any(line.style == "faint" for line in chart.lines):
            chart.subtitle = "faint: each row; in front of it the running mean"
        yield chart
    if not tokens_per_iter and all(sizes):
        for chart in charts:
            lines = [replace(line, x=line.x * (sizes[line.run] or 1)) for line in chart.lines]
            typical = [figure.after_the_beginning(line.x, line.y) for line in lines]
            title = f"{chart.title} over tokens"
            yield Chart(title, chart.unit, ".4f", lines, typical, chart.subtitle, over_tokens=True)


def training_lines(index: int, run: Run, names: list[str]) -> list[Line]:
    """The loss as it was logged, and its running mean in front of it if there are many rows."""
    label = names[index] if len(names) > 1 else "training"
    exists = np.isfinite(run.columns["loss"]) & np.isfinite(run.columns["iter"])
    x, y = run.columns["iter"][exists], run.columns["loss"][exists]
    window = len(y) // 50
    if window < 2:
        return [Line(label, index, x, y, index)]
    mean = Line(f"{label}, mean of {window} rows", index, x, figure.running_mean(y, window), index)
    return [Line(label, index, x, y, index, "faint"), mean]


def evaluation_lines(index: int, run: Run, names: list[str]) -> Iterator[Line]:
    if len(names) == 1:
        yield Line("evaluation, train", index, *run_record.evaluations(run, "train_loss"), 2, "dots")
    x, y = run_record.evaluations(run, "val_loss")
    label, color = (names[index], index) if len(names) > 1 else ("evaluation, val", 1)
    if len(names) > 1:
        yield Line(label, index, x, y, color)
    yield Line(label, index, x, y, color, "dots")


def timings(runs: list[Run], names: list[str]) -> Iterator[Chart]:
    """What depends on the step time: without the steps that include an evaluation."""
    for column, (title, unit, number) in TIMINGS.items():
        lines, typical = [], []
        for index, run in enumerate(runs):
            shown = ~run.with_evaluation
            plain = shown & ~run.warmup  # an earlier attempt, which may have been faster, is in sight, too
            label = names[index] if len(names) > 1 else title
            lines.append(Line(label, index, run.columns["iter"][shown], run.columns[column][shown], index))
            typical.append(run.columns[column][plain])
            if column == "mfu_percent" and has_causal(run):
                causal = run.columns["mfu_causal_percent"]
                label = f"{label}, causal"
                lines.append(Line(label, index, run.columns["iter"][shown], causal[shown], index, "faint"))
                typical.append(causal[plain])
        subtitle = subtitle_of(runs, column, number)
        spans = runs[0].warmup_spans if len(runs) == 1 else []
        notes = ["shaded: warm-up, with compilation; not in the median"] if spans else []
        yield Chart(title, unit, number, lines, typical, subtitle, notes, spans=spans)


def subtitle_of(runs: list[Run], column: str, number: str) -> str:
    """The formula and the peak, without which an MFU means nothing; of a single run the median."""
    parts = []
    if column == "mfu_percent":
        parts += [f"formula {' and '.join(runs[0].mfu_methods)}"] if runs[0].mfu_methods else []
    if len(runs) == 1 and (spread := run_record.spread(runs[0], column)):
        median, low, high = (format(value, number) for value in spread)
        which = "median of the last attempt" if runs[0].attempt_starts else "median"
        parts.append(f"{which} {median}, p10 to p90: {low} to {high}")
    if len(runs) > 1 and column == "mfu_percent" and any(map(has_causal, runs)):
        parts.append("faint: causal, without the masked half of the scores")
    return "; ".join(parts)


def has_causal(run: Run) -> bool:
    return bool(len(run_record.finite(run.columns["mfu_causal_percent"])))


def others(runs: list[Run], names: list[str]) -> Iterator[Chart]:
    for column, (title, unit, number) in OTHERS.items():
        labels = names if len(names) > 1 else [title]
        lines = [
            Line(label, index, run.columns["iter"], run.columns[column], index)
            for index, (run, label) in enumerate(zip(runs, labels, strict=True))
        ]
        yield Chart(title, unit, number, lines, [run.columns[column] for run in runs])
