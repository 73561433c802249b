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
from common.text import aligned, one_line  # noqa: E402
from plots import figure, run_record  # noqa: E402
from plots.run_record import METHODS, Run  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMINGS = {"mfu": "mfu_percent", "tokens": "tokens_per_sec"}  # panel: column
# panel: what no run has logged if there is no such panel
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
    rows = [[label, *cells(run)] for run, label in zip(runs, labels, strict=True)]
    return "\n".join(aligned(head, rows, ("run", "status", "precision", "MFU method")))


def differences(runs: list[Run], labels: list[str]) -> str:
    """The settings that differ, a line each; '-' where a record does not have the key."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = [setting(run.config[name]) if name in run.config else "-" for run in runs]
        known = {value for run, value in zip(runs, values, strict=True) if name in run.config}
        if len(known) > 1 and name != "out_dir":  # the labels name the folders
            rows.append([one_line(name), *values])
    if len(runs) < 2 or not any(run.config for run in runs):
        return ""
    if not rows:
        return "The settings of these runs are the same, but for out_dir."
    return "\n".join(aligned(["setting", *labels], rows, ["setting", *labels]))


def setting(value: Any) -> str:
    return textwrap.shorten(one_line(str(value)), 40, placeholder="...") or "''"


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
    """What no run has logged has no panel, but a line under the others."""
    columns = {"loss": "loss", **TIMINGS}
    logged = {panel: [run.columns[column] for run in runs] for panel, column in columns.items()}
    logged["val"] = [run_record.evaluations(run, "val_loss")[1] for run in runs]
    names = [panel for panel in ABSENT if len(run_record.finite(np.concatenate(logged[panel])))]
    fig = figure.new_figure(15, 2 + 4 * -(-len(names) // 2) + 0.2 * len(runs))  # a line each in the legend
    axes = figure.panels(fig, names)
    figure.limit_x(axes, runs)
    styles = line_styles(len(runs))
    draw_losses(axes, runs, styles)
    draw_timings(axes, runs, styles)
    missing = [f"None of these runs logged {what}." for panel, what in ABSENT.items() if panel not in names]
    figure.note(fig, missing)
    names = [legend_label(run, label) for run, label in zip(runs, labels, strict=True)]
    fig.legend(figure.legend_lines(styles), names, loc="outside lower left", frameon=False, fontsize=9)
    return fig


def draw_losses(axes: dict[str, Axes], runs: list[Run], styles: list[dict[str, Any]]) -> None:
    """Over tokens where the runs' iterations have different numbers of them: a loss depends on tokens."""
    sizes = [run.tokens_per_iter for run in runs]
    by_tokens = None not in sizes and len(set(sizes)) > 1
    for panel, title in (("loss", "Training loss"), ("val", "Validation loss")):
        if panel not in axes:
            continue
        figure.label_axis(axes[panel], title, "cross-entropy, nats per token")
        lines = []
        for run, style in zip(runs, styles, strict=True):
            x, y = run.columns["iter"], run.columns["loss"]
            if panel == "val":
                x, y = run_record.evaluations(run, "val_loss")
            x = (x + 1) * run.tokens_per_iter if by_tokens and run.tokens_per_iter else x
            lines.append((x, y))
            if panel == "val":
                figure.draw(axes[panel], x, y, marker="o", markersize=6, markerfacecolor="none", **style)
            else:
                figure.draw_smoothed(axes[panel], x, y, **style)
        figure.limit_y(
            axes[panel], [y for _, y in lines], [figure.after_the_beginning(*line) for line in lines]
        )
        if by_tokens:
            figure.show_tokens(axes[panel])
        elif sizes[0] and len(set(sizes)) == 1:
            figure.add_token_axis(axes[panel], sizes[0])


def draw_timings(axes: dict[str, Axes], runs: list[Run], styles: list[dict[str, Any]]) -> None:
    method = next((run.mfu_methods[0] for run in runs if run.mfu_methods), None)
    text = {
        "mfu": (f"MFU by {method}" if method else "MFU", "MFU (%)", None),
        "tokens": ("Throughput", "tokens/s, all GPUs", "{x:,.0f}"),
    }
    for panel, name in TIMINGS.items():
        if panel not in axes:
            continue
        figure.label_axis(axes[panel], *text[panel])
        for run, style in zip(runs, styles, strict=True):
            shown = ~run.with_evaluation
            figure.draw(axes[panel], run.columns["iter"][shown], run.columns[name][shown], **style)
        drawn = [run.columns[name][~run.with_evaluation] for run in runs]
        figure.limit_y(axes[panel], drawn, typical=[run.columns[name][run.timed] for run in runs])


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
    if different := differences(runs, labels):
        print(f"\n{different}")
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
