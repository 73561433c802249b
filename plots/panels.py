"""The panels that the plot of one run, the plot of several and the page share: the loss, and what each row of
a record has, over the iterations. Without labels a panel is of one run, with its marks and a legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common.errors import UserError
from plots import figure, run_record
from plots.figure import Panel
from plots.run_record import Run, dicts, evaluations, finite, iterations_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_MARKS = 100  # anomalies, and checkpoints, that are marked
TOKENIZERS_DIFFER = (
    "losses are not drawn: they are in nats per token, and these runs have tokens of different tokenizers; "
    "compare bits per byte of one text, by tools.evaluate"
)

Scale = Callable[[np.ndarray], np.ndarray]  # places on an axis of iterations
AXES: dict[str, tuple[str, Any]] = {  # of the losses: label, form of the numbers
    "iter": ("iteration", None),
    "tokens": ("tokens", figure.tokens_text),
    "time": ("minutes of training", "{x:,g}"),
    "flops": ("FLOPs", "{x:.2g}"),
}


class Column(NamedTuple):
    title: str
    unit: str
    form: str | None  # of the numbers at the axis
    median_form: str = ""  # of a column that depends on the step time


COLUMNS = {
    "mfu_percent": Column("MFU", "MFU (%)", None, ",.2f"),
    "tokens_per_sec": Column("Throughput", "tokens/s, all GPUs", "{x:,.0f}", ",.0f"),
    "time_ms": Column("Step time", "ms per iteration", "{x:,.0f}", ",.1f"),
    "memory_gb": Column("Peak memory", "GiB per GPU", None),
    "sm_clock_mhz": Column("GPU clock", "SM clock, MHz, median over the row", "{x:,.0f}"),
    "power_w": Column("GPU power", "W per GPU, median over the row", "{x:,.0f}"),
    "lr": Column("Learning rate", "learning rate", "{x:.3g}"),
    "grad_norm": Column("Gradient norm before clipping", "global L2 norm", None),
}


def line_styles(number: int) -> list[dict[str, Any]]:
    """A color and a dash pattern for each run, different ones for up to 40 runs."""
    dashes = ["-", "--", ":", "-."]
    styles = ({"color": f"C{i % 10}", "linestyle": dashes[i // 10 % 4]} for i in range(number))
    return [{**style, "alpha": 0.85} for style in styles]


def panels_of(
    runs: list[Run], labels: list[str], columns: Iterable[str], x: str | None = None
) -> list[Panel]:
    """x: of the losses, one of AXES. None: iterations of one run; of several tokens, on which a loss depends,
    if all logs say how many. Raises UserError if a log does not say what x asks for."""
    x = x or ("tokens" if labels and all(run.tokens_per_iter for run in runs) else "iter")
    return [loss_panel(runs, labels, x), *(column_panel(column, runs, labels) for column in columns)]


# --- the loss ---


def loss_panel(runs: list[Run], labels: list[str], x: str) -> Panel:
    scales = [scale_of(run, x) for run in runs]
    absent = "" if any(len(finite(y)) for run in runs for _, y in losses(run)) else "Loss was not logged."
    if run_record.tokenizers_differ(runs):
        absent = f"{TOKENIZERS_DIFFER.capitalize()}."
    return Panel("Loss", partial(draw_loss, runs=runs, labels=labels, x=x, scales=scales), absent)


def scale_of(run: Run, x: str) -> Scale:
    """Raises UserError if the log does not say what it takes."""
    if x == "time" and (progress := run.progress):
        return lambda iterations: progress.seconds_at(iterations) / 60
    tokens = run.tokens_per_iter or math.nan
    amount = {"iter": 1, "tokens": tokens, "flops": tokens * run.flops_per_token}.get(x, math.nan)
    if math.isnan(amount):
        raise UserError(f"--x {x}: {run.path} does not say its {AXES[x][0]}; take --x iter")
    return lambda iterations: amount * iterations


def losses(run: Run) -> list[tuple[np.ndarray, np.ndarray]]:
    """(iterations, losses) of the rows, and of the evaluations on training and on validation data."""
    rows = (run.columns["iter"], run.columns["loss"])
    return [rows, evaluations(run, "train_loss"), evaluations(run, "val_loss")]


def draw_loss(axis: Axes, runs: list[Run], labels: list[str], x: str, scales: list[Scale]) -> None:
    title = "Loss (crosses: validation)" if labels else "Loss"
    figure.label_axis(axis, title, "loss, nats per token", title_pad=6 if labels else 34)
    drawn = []
    for run, place, label, style in zip(runs, scales, labels or [""], line_styles(len(runs)), strict=True):
        rows, trained, validated = ((place(iterations), y) for iterations, y in losses(run))
        figure.draw(axis, *rows, label or "training step", smooth=True, **style)
        # a ring and a cross: both are seen where the two losses are equal
        style |= {"linestyle": ":", "markersize": 7, "markerfacecolor": "none"}
        if not labels:
            figure.draw(axis, *trained, label="evaluation, train", **style | {"marker": "o", "color": "C2"})
            style["color"] = "C3"
        val_label = f"_{label}, validation" if label else "evaluation, val"
        figure.draw(axis, *validated, label=val_label, **style | {"marker": "x"})
        drawn += [rows, validated] if labels else [rows, trained, validated]
    if labels:
        figure.make_logarithmic(axis, [y for _, y in drawn])
    figure.limit_y(axis, [y for _, y in drawn], [figure.after_the_beginning(*line) for line in drawn])
    if x != "iter":  # its own limits and label, instead of those of the iterations
        axis.set_xlabel(AXES[x][0])
        axis.autoscale(axis="x")
        axis.locator_params(axis="x", integer=False)
        axis.xaxis.set_major_formatter(AXES[x][1])
    if not labels:
        mark_events(axis, runs[0], scales[0])
        figure.legend(axis)


def mark_events(axis: Axes, run: Run, place: Scale) -> None:
    """Where the run was resumed, saved a checkpoint or met an anomaly."""
    starts = iterations_of(dicts(run.record, "attempts")[1:], "start_iter") - 0.5
    anomalies, saved = (iterations_of(dicts(run.record, name)) for name in ("events", "checkpoints"))
    for places, label, color in ((starts, "resumed", "gray"), (anomalies[:MOST_MARKS], "anomaly", "tab:red")):
        for index, at in enumerate(place(places)):
            axis.axvline(at, label=None if index else label, color=color, linewidth=1, linestyle="-.")
    if len(saved := saved[-MOST_MARKS:]):
        style: dict[str, Any] = {"color": "black", "marker": "^", "linestyle": "", "label": "checkpoint"}
        axis.plot(place(saved), np.full(len(saved), 0.01), transform=axis.get_xaxis_transform(), **style)


# --- the columns of the rows ---


def column_panel(column: str, runs: list[Run], labels: list[str]) -> Panel:
    """A line for each run."""
    title, absent = COLUMNS[column].title, ""
    if not any(np.isfinite(run.columns[column]).any() for run in runs):
        absent = f"{title} was not logged."
        if column == "mfu_percent" and not labels:
            absent = f"No MFU: {runs[0].why_no_mfu}"
    return Panel(title, partial(draw_column, column=column, runs=runs, labels=labels), absent)


def draw_column(axis: Axes, column: str, runs: list[Run], labels: list[str]) -> None:
    title, unit, form, median_form = COLUMNS[column]
    heading = title
    if column == "mfu_percent":  # an MFU means nothing without its formula and its peak
        heading += f" by {next((run.mfu_methods[0] for run in runs if run.mfu_methods), 'no formula')}"
        heading += f" of {runs[0].peak}" * (len(runs) == 1 and bool(runs[0].peak))
    figure.label_axis(axis, heading, unit, form, title_pad=6 if labels else 20)
    for run, style, label in zip(runs, line_styles(len(runs)), labels or [f"_{title}"], strict=True):
        figure.draw(axis, run.columns["iter"], run.columns[column], label=label, **style)
    # an earlier attempt, which may have been faster, is in sight, too
    typical = [run.columns[column][~run.warmup if median_form else slice(None)] for run in runs]
    if column == "mfu_percent" and not labels:
        faint: dict[str, Any] = {"color": "C0", "alpha": 0.35, "marker": ""}
        causal = runs[0].columns["mfu_causal_percent"]
        figure.draw(axis, runs[0].columns["iter"], causal, label="causal", **faint)
        typical.append(causal[~runs[0].warmup])
    if median_form and not labels:
        mark_usual(axis, runs[0], column, median_form)
    figure.limit_y(axis, [run.columns[column] for run in runs], typical)


def mark_usual(axis: Axes, run: Run, column: str, form: str) -> None:
    """Shades the warm-up, and marks the median of the other steps."""
    if spread := run_record.spread(run, column):
        median, low, high = (format(value, form) for value in spread)
        label = f"median {median}, p10 to p90: {low} to {high}"
        axis.axhline(spread[0], color="tab:orange", linewidth=1, linestyle="--", label=label)
    rows = np.flatnonzero(run.warmup)
    for number, series in enumerate(np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)):
        if len(series):  # one for each attempt
            first, last = run.columns["iter"][series[[0, -1]]]
            style: dict[str, Any] = {"color": "gray", "alpha": 0.25, "linewidth": 0}
            axis.axvspan(first - 0.5, last + 0.5, label="_" * bool(number) + "warm-up", **style)
    figure.legend(axis)
