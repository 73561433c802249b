"""Compares run records: which is faster and whether that is certain, what differs, and the curves in one PNG.

    python plots/compare_runs.py out-llama-1.36b/run_*.json out-qwen3-1.8b-b200/run_*.json --method v3
    python plots/compare_runs.py out-b/run_*.json --baseline out-a/run_*.json

Without --baseline each run is compared with the first. With it, the records after it are repeats of the
baseline, and the others are repeats of what is compared with it.
MFUs by different FLOPs formulas never share an axis: that is refused unless --method recounts them by one.
Losses of different tokenizers are not drawn: a token of one is not a token of the other.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.text import one_line  # noqa: E402
from plots import comparison_text, figure, run_record  # noqa: E402
from plots.figure import Panel  # noqa: E402
from plots.run_record import METHODS, Run  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# more panels of the page: column: title, unit, format of the axis, its name in a line
FURTHER: dict[str, tuple[str, str, str | None, str]] = {
    "lr": ("Learning rate", "learning rate", "{x:.2e}", "a learning rate"),
    "grad_norm": ("Gradient norm before clipping", "global L2 norm", None, "a gradient norm"),
    "sm_clock_mhz": ("SM clock", "MHz, median over the row", "{x:,.0f}", "an SM clock"),
    "max_allocated_gb": ("Peak GPU memory", "GiB", None, "GPU memory"),
}
SPARSE_MARK = " (2:4 sparse peak)"
TOKENIZERS_DIFFER = (
    "losses are not drawn: they are in nats per token, and these runs have tokens of different tokenizers; "
    "compare bits per byte of one text, by tools.evaluate"
)


def run_labels(runs: list[Run]) -> list[str]:
    """Folder and name, because default run names are only times; the whole path where these are equal."""
    labels = [one_line(f"{run.path.resolve().parent.name}/{run.name}") for run in runs]
    return [
        label if labels.count(label) == 1 else one_line(str(run.path))
        for run, label in zip(runs, labels, strict=True)
    ]


def require_one_method(runs: list[Run]) -> None:
    """Raises UserError when the runs' MFUs were counted by different formulas."""
    users: dict[str, list[str]] = {}
    for run in runs:
        for method in run.mfu_methods:
            users.setdefault(method, []).append(one_line(run.path.name))
    if len(users) > 1:
        listing = "; ".join(f"{method} ({', '.join(names)})" for method, names in sorted(users.items()))
        raise UserError(
            f"these runs count MFU by different formulas, which cannot share an axis: {listing}. "
            f"Add --method {'|'.join(METHODS)} to recount them all by one"
        )


def warnings_about(runs: list[Run], labels: list[str]) -> list[str]:
    """Where equal MFUs do not mean equal speed, where an MFU cannot be true, and why no loss is drawn."""
    named = [(run, label) for run, label in zip(runs, labels, strict=True) if run.mfu_methods]
    sparse = [label for run, label in named if run.sparse]
    peaks = {f"{run.peak_tflops_per_gpu:,.6g}" for run, _ in named if run.peak_tflops_per_gpu}
    found = []
    if sparse and len(sparse) < len(named):
        found.append(
            f"WARNING: the MFU of {', '.join(sparse)} is of the 2:4 sparse peak, twice the dense one: "
            "NOT comparable with the others; compare tokens/s, or run again with use_sparse_specs=False"
        )
    elif len(peaks) > 1:
        listing = " and ".join(sorted(peaks))
        found.append(f"warning: these MFUs are of different peaks: {listing} TFLOPS per GPU")
    for run, label in named:
        if (spread := run_record.spread(run, "mfu_percent")) and spread[0] > 100:
            found.append(f"WARNING: {label}: an MFU above 100 % is an error of measurement")
    if run_record.tokenizers_differ(runs):
        found.append(f"warning: {TOKENIZERS_DIFFER}")
    return found


# --- the figure ---


def plot(runs: list[Run], labels: list[str]) -> Figure:
    """What no run has logged has no panel, but a line under the others, which a legend there would cover."""
    drawn, styles = panels(runs, labels), line_styles(len(runs))
    rows = -(-sum(not panel.absent for panel in drawn) // 2)
    fig = figure.new_figure(15, 2 + 4 * rows + 0.2 * len(runs))  # a line each in the legend
    figure.draw_panels(fig, drawn, runs)
    names = [legend_label(run, label) for run, label in zip(runs, labels, strict=True)]
    fig.legend(figure.legend_lines(styles), names, loc="outside upper left", frameon=False, fontsize=9)
    return fig


def panels(runs: list[Run], labels: list[str], further: bool = False) -> list[Panel]:
    """Of the PNG; with `further` also the others of the page."""
    method = next((run.mfu_methods[0] for run in runs if run.mfu_methods), None)
    mfu = f"MFU by {method}" if method else "MFU"
    losses = {"Training loss": "a loss", "Validation loss": "an evaluation"}
    if run_record.tokenizers_differ(runs):
        found = [Panel("Loss", lambda axis: None, f"{TOKENIZERS_DIFFER.capitalize()}.")]
    else:
        found = [panel_of(title, draw_losses, runs, labels, what) for title, what in losses.items()]
    columns: dict[str, tuple[str, str, str | None, str]] = {
        "mfu_percent": (mfu, "MFU (%)", None, "an MFU"),
        "tokens_per_sec": ("Throughput", "tokens/s, all GPUs", "{x:,.0f}", "tokens/s"),
    }
    for column, (title, unit, form, what) in (columns | FURTHER if further else columns).items():
        draw = partial(draw_column, text=(title, unit, form))
        found.append(panel_of(column, draw, runs, labels, what, title))
    return found


def panel_of(
    column: str, draw: Callable[..., None], runs: list[Run], labels: list[str], what: str, title: str = ""
) -> Panel:
    is_logged = any(len(run_record.finite(points(run, column)[1])) for run in runs)
    absent = "" if is_logged else f"None of these runs logged {what}."
    return Panel(title or column, partial(draw, column=column, runs=runs, labels=labels), absent)


def points(run: Run, column: str) -> tuple[np.ndarray, np.ndarray]:
    """(iterations, values). Values that depend on the step time are without the steps with an evaluation."""
    if column == "Validation loss":
        return run_record.evaluations(run, "val_loss")
    values = run.columns.get(column, run.columns["loss"])
    shown = ~run.with_evaluation if column in ("mfu_percent", "tokens_per_sec") else slice(None)
    return run.columns["iter"][shown], values[shown]


def draw_losses(axis: Axes, column: str, runs: list[Run], labels: list[str]) -> None:
    """Over tokens, on which a loss depends; over iterations only if a log does not say how many tokens."""
    by_tokens = all(run.tokens_per_iter for run in runs)
    figure.label_axis(axis, column, "cross-entropy, nats per token")
    lines = []
    for run, label, style in zip(runs, labels, line_styles(len(runs)), strict=True):
        x, y = points(run, column)
        x = x * run.tokens_per_iter if by_tokens and run.tokens_per_iter else x
        lines.append((x, y))
        if column == "Validation loss":
            mark: dict[str, Any] = {"marker": "o", "markersize": 6, "markerfacecolor": "none"}
            figure.draw(axis, x, y, label=label, **mark, **style)
        else:
            figure.draw_smoothed(axis, x, y, label, **style)
    drawn = [y for _, y in lines]
    figure.make_logarithmic(axis, drawn)
    figure.limit_y(axis, drawn, [figure.after_the_beginning(*line) for line in lines])
    if by_tokens:
        figure.show_tokens(axis)


def draw_column(
    axis: Axes, column: str, runs: list[Run], labels: list[str], text: tuple[str, str, str | None]
) -> None:
    figure.label_axis(axis, *text)
    lines = [points(run, column) for run in runs]
    for line, label, style in zip(lines, labels, line_styles(len(runs)), strict=True):
        figure.draw(axis, *line, label=label, **style)
    is_timing = column in ("mfu_percent", "tokens_per_sec")
    typical = [run.columns[column][run.timed] if is_timing else run.columns[column] for run in runs]
    figure.limit_y(axis, [y for _, y in lines], typical)


def line_styles(number: int) -> list[dict[str, Any]]:
    """A color and a dash pattern for each run, different ones for up to 40 runs."""
    colors = [f"C{index}" for index in range(10)]
    dashes = ["-", "--", ":", "-."]
    return [
        {"color": colors[index % 10], "linestyle": dashes[index // 10 % 4], "alpha": 0.85}
        for index in range(number)
    ]


def legend_label(run: Run, label: str) -> str:
    missing = "" if run.mfu_methods else f" · no MFU: {textwrap.shorten(run.why_no_mfu, 70)}"
    return figure.literal(
        f"{label} · {run.model} · {run.machine} · {run.precision}{SPARSE_MARK * run.sparse}{missing}"
    )


def compare(patterns: list[str], baseline: list[str], method: str | None, output: str | None) -> None:
    target = figure.output_path(output) if output else None
    sides = read_sides(patterns, baseline, method)
    runs = [run for side in sides for run in side]
    require_one_method(runs)
    names, labels = comparison_text.run_names(sides), run_labels(runs)
    for warning in warnings_about(runs, labels):
        print(warning, file=sys.stderr)
    parts = [
        comparison_text.legend(runs, names, labels),
        comparison_text.table(runs, names),
        [part for line in comparison_text.verdict_lines(sides) for part in comparison_text.wrapped(line)],
        comparison_text.differences(sides),
    ]
    print("\n\n".join("\n".join(lines) for lines in parts if lines))
    titles = [f"{name}  {label}" for name, label in zip(names, labels, strict=True)]
    figure.save(plot(runs, titles), target or runs[0].path.with_name("compare_runs.png"))


def read_sides(patterns: list[str], baseline: list[str], method: str | None) -> list[list[Run]]:
    """The baseline first; without one each run is a side of its own."""
    paths = run_record.expand_globs(patterns)
    sides = [run_record.expand_globs(baseline), paths] if baseline else [[path] for path in paths]
    if baseline and (both := {path.resolve() for path in sides[0]} & {path.resolve() for path in paths}):
        raise UserError(f"{min(both)} is on both sides; name each record once")
    runs = [[run_record.load_run(path) for path in side] for side in sides]
    if method:
        runs = [[run_record.recounted(run, METHODS.get(method, method)) for run in side] for side in runs]
    return runs


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_and_compare, argv)


def add_sides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="run records, or globs of them")
    repeats = "repeats of the baseline; the records before it are then repeats of the other side"
    parser.add_argument("--baseline", nargs="+", metavar="RUN.json", default=[], help=repeats)
    names = [*METHODS, *METHODS.values()]
    parser.add_argument("--method", choices=names, help="recount every MFU by this FLOPs formula")


def parse_and_compare(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(description="Say which run is faster and what differs; draw the curves.")
    add_sides(parser)
    where = "default: compare_runs.png beside the first record"
    parser.add_argument("--output", metavar="PATH.png", help=where)
    options = parser.parse_args(argv)
    compare(options.runs, options.baseline, options.method, options.output)


if __name__ == "__main__":
    sys.exit(main())
