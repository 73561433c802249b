"""Run records side by side: loss, validation loss, MFU and tokens/s in one PNG, and a table on stdout.

    python plots/compare_runs.py out-llama-1.36b/run_*.json out-qwen3-1.8b-b200/run_*.json --method v3

MFUs by different FLOPs formulas never share an axis: that is refused unless --method recounts them by one.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.text import one_line  # noqa: E402
from plots import figure, run_record  # noqa: E402
from plots.run_record import METHODS, Run  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMINGS = {"mfu": "mfu_percent", "tokens": "tokens_per_sec"}  # panel: column
# panel: what no run has logged if the panel is empty
ABSENT = {"loss": "a loss", "val": "an evaluation", "mfu": "an MFU", "tokens": "tokens/s"}
SPARSE_MARK = " (2:4 sparse peak)"


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


def warn_about_peaks(runs: list[Run], labels: list[str]) -> None:
    """Warns on stderr where equal MFUs do not mean equal speed, and where an MFU cannot be true."""
    named = [(run, label) for run, label in zip(runs, labels, strict=True) if run.mfu_methods]
    sparse = [label for run, label in named if run.sparse]
    peaks = {f"{run.peak_tflops_per_gpu:,.6g}" for run, _ in named if run.peak_tflops_per_gpu}
    if sparse and len(sparse) < len(named):
        print(
            f"WARNING: the MFU of {', '.join(sparse)} is of the 2:4 sparse peak, twice the dense one: "
            "NOT comparable with the others; compare tokens/s, or run again with use_sparse_specs=False",
            file=sys.stderr,
        )
    elif len(peaks) > 1:
        listing = " and ".join(sorted(peaks))
        print(f"warning: these MFUs are of different peaks: {listing} TFLOPS per GPU", file=sys.stderr)
    for run, label in named:
        if (spread := run_record.spread(run, "mfu_percent")) and spread[0] > 100:
            print(f"WARNING: {label}: an MFU above 100 % is an error of measurement", file=sys.stderr)


# --- the table ---


def table(runs: list[Run], labels: list[str]) -> str:
    head = ["run", "status", "GPUs", "precision", "final loss", "best val loss"]
    head += ["MFU %, p10 to p90", "tokens/s, p10 to p90", "max GB", "peak TFLOPS/GPU", "MFU method"]
    rows = [head, *([label, *cells(run)] for run, label in zip(runs, labels, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [lines[0], "-" * len(lines[0]), *lines[1:]])


def cells(run: Run) -> list[str]:
    memory = run_record.finite(np.fmax(run.columns["max_allocated_gb"], run.columns["allocated_gb"]))
    peak = run.peak_tflops_per_gpu
    return [
        run.status.split(" (")[0],
        str(run.num_gpus or "-"),
        run.precision,
        "-" if run.final_loss is None else f"{run.final_loss:.4f}",
        "-" if run.best_val_loss is None else f"{run.best_val_loss:.4f}",
        spread_text(run, "mfu_percent", ".2f"),
        spread_text(run, "tokens_per_sec", ",.0f"),
        f"{memory.max():.2f}" if len(memory) else "-",
        f"{peak:,.6g}{' 2:4 sparse' if run.sparse else ''}" if peak else "-",
        " and ".join(run.mfu_methods) or "-",
    ]


def spread_text(run: Run, name: str, number: str) -> str:
    spread = run_record.spread(run, name)
    if spread is None:
        return "-"
    median, low, high = (format(value, number) for value in spread)
    return f"{median} ({low} to {high})"


# --- the figure ---


def plot(runs: list[Run], labels: list[str]) -> Figure:
    fig = figure.new_figure(15, 10 + 0.2 * len(runs))  # each run has a line in the legend
    axes = fig.subplot_mosaic([["loss", "val"], ["mfu", "tokens"]])
    method = next((run.mfu_methods[0] for run in runs if run.mfu_methods), None)
    figure.label_axis(axes["loss"], "Training loss", "cross-entropy, nats per token")
    figure.label_axis(axes["val"], "Validation loss", "cross-entropy, nats per token")
    figure.label_axis(axes["mfu"], f"MFU by {method}" if method else "MFU", "MFU (%)")
    figure.label_axis(axes["tokens"], "Throughput", "tokens/s, all GPUs", "{x:,.0f}")
    figure.limit_x(axes, runs)
    styles = line_styles(len(runs))
    for run, style in zip(runs, styles, strict=True):
        iters, shown = run.columns["iter"], ~run.with_evaluation
        figure.draw(axes["loss"], iters, run.columns["loss"], **style)
        evaluations = run_record.evaluations(run, "val_loss")
        figure.draw(axes["val"], *evaluations, marker="D", markersize=4, **style)
        for panel, name in TIMINGS.items():
            figure.draw(axes[panel], iters[shown], run.columns[name][shown], **style)
    for panel, name in TIMINGS.items():
        drawn = [run.columns[name][~run.with_evaluation] for run in runs]
        figure.limit_y(axes[panel], drawn, typical=[run.columns[name][run.timed] for run in runs])
    for panel, what in ABSENT.items():
        if not axes[panel].lines:
            figure.explain_empty(axes[panel], f"none of these runs logged {what}")

    handles = [axes["loss"].plot([], [], linewidth=2.5, **style)[0] for style in styles]
    names = [legend_label(run, label) for run, label in zip(runs, labels, strict=True)]
    fig.legend(handles, names, loc="outside lower left", frameon=False, fontsize=9)
    return fig


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


def compare(patterns: list[str], method: str | None, output: str | None) -> None:
    target = figure.png_path(output) if output else None
    paths = run_record.expand_globs(patterns)
    runs = [run_record.load_run(path) for path in paths]
    if method:
        runs = [run_record.recounted(run, METHODS.get(method, method)) for run in runs]
    require_one_method(runs)
    labels = run_labels(runs)
    warn_about_peaks(runs, labels)
    print(table(runs, labels))
    figure.save(plot(runs, labels), target or paths[0].with_name("compare_runs.png"))


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_and_compare, argv)


def parse_and_compare(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(description="Overlay run records in one PNG and print them as a table.")
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="run records, or globs of them")
    names = [*METHODS, *METHODS.values()]
    parser.add_argument("--method", choices=names, help="recount every MFU by this FLOPs formula")
    where = "default: compare_runs.png beside the first record"
    parser.add_argument("--output", metavar="PATH.png", help=where)
    options = parser.parse_args(argv)
    compare(options.runs, options.method, options.output)


if __name__ == "__main__":
    sys.exit(main())
