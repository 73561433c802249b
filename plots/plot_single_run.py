"""One PNG per run record: loss, MFU, tokens/s, step time, memory, learning rate and gradient norm.

    python plots/plot_single_run.py out-qwen3-1.8b-b200/run_*.json

Reads only the JSON, so it works on a laptop, during a run and after a crash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from plots import figure, run_record  # noqa: E402
from plots.run_record import Run  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot(run: Run) -> Figure:
    """The figure of one run. A panel without data says why."""
    fig = figure.new_figure(14, 15)
    axes = fig.subplot_mosaic([["loss", "loss"], ["mfu", "tokens"], ["time", "memory"], ["lr", "gradients"]])
    title = f"{run.name}\n{run.model} · {run.machine} · {run.precision} · {run.status}"
    fig.suptitle(figure.literal(title), fontsize=13)
    figure.limit_x(axes, [run])
    draw_loss(axes["loss"], run)

    label_axis(axes["mfu"], mfu_title(run), "MFU (%)")
    faint = {"mfu_causal_percent": "causal scores only"}
    draw_timing(axes["mfu"], run, "mfu_percent", ",.2f", absent=f"No MFU: {run.why_no_mfu}", faint=faint)
    label_axis(axes["tokens"], "Throughput", "tokens/s, all GPUs", "{x:,.0f}")
    draw_timing(axes["tokens"], run, "tokens_per_sec", ",.0f", absent="no tokens/s logged")
    label_axis(axes["time"], "Step time", "ms per iteration", "{x:,.0f}")
    draw_timing(axes["time"], run, "time_ms", ",.1f", absent="no step time logged")

    label_axis(axes["memory"], "GPU memory", "GB")
    memory = {"max_allocated_gb": "peak", "allocated_gb": "allocated"}
    if draw_columns(axes["memory"], run, memory, absent="no GPU memory logged"):
        axes["memory"].set_ylim(bottom=0)
    label_axis(axes["lr"], "Learning rate", "learning rate", "{x:.2e}")
    draw_columns(axes["lr"], run, {"lr": None}, absent="no learning rate logged")
    label_axis(axes["gradients"], "Gradient norm before clipping", "global L2 norm")
    absent = "no gradient norm logged (gradient_log_interval sets how often)"
    if draw_columns(axes["gradients"], run, {"grad_norm": None}, absent=absent):
        norms = run.columns["grad_norm"]
        figure.limit_y(axes["gradients"], drawn=[norms], typical=[norms])
    return fig


def label_axis(axis: Axes, title: str, ylabel: str, number_format: str | None = None) -> None:
    figure.label_axis(axis, title, ylabel, number_format, title_pad=20)  # leaves a line for the legend


def draw_loss(axis: Axes, run: Run) -> None:
    label_axis(axis, "Loss", "cross-entropy, nats per token")
    drawn = figure.draw(axis, run.columns["iter"], run.columns["loss"], alpha=0.8, label="training step")
    for name, marker, color in (("train", "s", "tab:green"), ("val", "D", "tab:red")):
        style: dict[str, Any] = {"marker": marker, "markersize": 5, "linestyle": ":", "color": color}
        points = run_record.evaluations(run, f"{name}_loss")
        drawn |= figure.draw(axis, *points, label=f"evaluation, {name}", **style)
    if not drawn:
        return figure.explain_empty(axis, "no loss logged")
    for index, start in enumerate(run.attempt_starts):
        style = {"color": "gray", "linewidth": 1, "linestyle": "-."}
        axis.axvline(start - 0.5, label=None if index else "resumed", **style)
    figure.legend(axis)


def mfu_title(run: Run) -> str:
    """With the formula and the peak, because an MFU means nothing without them."""
    method = " and ".join(run.mfu_methods)
    peak, spread = run.peak_tflops_per_gpu, run_record.spread(run, "mfu_percent")
    parts = [
        f"MFU by {method}" if method else "MFU",
        f" of {peak:,.5g} TF per GPU" if peak else "",
        ", 2:4 sparse" if run.sparse else "",
        "\nabove 100 %: an error of measurement" if spread and spread[0] > 100 else "",
    ]
    return "".join(parts)


def draw_timing(
    axis: Axes, run: Run, name: str, number: str, absent: str, faint: dict[str, str] | None = None
) -> None:
    """A column that depends on the step time: without the steps that include an evaluation, with the warm-up
    shaded and the median of the other steps marked.

    number is the format of the median; absent is shown if there is no data; faint are more columns,
    {name: legend label}, drawn in the background.
    """
    shown = ~run.with_evaluation
    if not figure.draw(axis, run.columns["iter"][shown], run.columns[name][shown], color="tab:blue"):
        return figure.explain_empty(axis, absent)
    for other, label in (faint or {}).items():
        style: dict[str, Any] = {"color": "tab:blue", "alpha": 0.35, "marker": ""}
        figure.draw(axis, run.columns["iter"][shown], run.columns[other][shown], label=label, **style)
    if spread := run_record.spread(run, name):
        median, low, high = (format(value, number) for value in spread)
        label = f"median {median}, p10 to p90: {low} to {high}"
        axis.axhline(spread[0], color="tab:orange", linewidth=1, linestyle="--", label=label)
    for index, (first, last) in enumerate(run.warmup_spans):  # one for each attempt
        in_legend = None if index else "warm-up"
        axis.axvspan(first - 0.5, last + 0.5, color="gray", alpha=0.25, linewidth=0, label=in_legend)
    typical = [run.columns[each][run.timed] for each in (name, *(faint or {}))]
    figure.limit_y(axis, drawn=[run.columns[name][shown]], typical=typical)
    figure.legend(axis)


def draw_columns(axis: Axes, run: Run, labels: Mapping[str, str | None], absent: str) -> bool:
    """Columns as they are, {name: legend label}. False when none of them was logged."""
    for name, label in labels.items():
        figure.draw(axis, run.columns["iter"], run.columns[name], label=label)
    if not axis.lines:
        figure.explain_empty(axis, absent)
    figure.legend(axis)
    return bool(axis.lines)


def plot_all(patterns: list[str], output: str | None) -> None:
    paths = run_record.expand_globs(patterns)
    if output and len(paths) > 1:
        raise UserError(f"--output is one file, but {len(paths)} runs were given; plot them one by one")
    target = figure.png_path(output) if output else None
    # all are read before the first PNG is written, so that a bad file stops the command here
    runs = [run_record.load_run(path) for path in paths]
    for run in runs:
        figure.save(plot(run), target or run.path.with_suffix(".png"))


def main(argv: list[str] | None = None) -> int:
    return run_command(parse_and_plot, argv)


def parse_and_plot(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(description="Draw each run record as one PNG beside it.")
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="run records, or globs of them")
    parser.add_argument("--output", metavar="PATH.png", help="where the PNG goes when there is one run")
    options = parser.parse_args(argv)
    plot_all(options.runs, options.output)


if __name__ == "__main__":
    sys.exit(main())
