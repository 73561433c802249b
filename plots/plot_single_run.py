"""One PNG per run record: loss, MFU, tokens/s, step time, memory, learning rate and gradient norm.

    python plots/plot_single_run.py out-qwen3-1.8b-b200/run_*.json

Reads only the JSON, so it works on a laptop, during a run and after a crash.
"""

from __future__ import annotations

import argparse
import sys

import figure
import run_record
from run_record import Run

PANELS = [["loss", "loss"], ["mfu", "tokens"], ["time", "memory"], ["lr", "gradients"]]


def plot(run: Run):
    """The figure of one run. Every panel that has nothing to show says why."""
    fig = figure.new_figure(14, 15)
    axes = fig.subplot_mosaic(PANELS)
    title = f"{run.name}\n{run.model} · {run.machine} · {run.precision} · {run.status}"
    fig.suptitle(figure.plain(title), fontsize=13)
    figure.limit_x(axes, [run])
    draw_loss(axes["loss"], run)

    dress(axes["mfu"], mfu_title(run), "MFU (%)")
    faint = {"mfu_causal_percent": "causal scores only"}
    draw_timing(axes["mfu"], run, "mfu_percent", ",.2f", absent=f"No MFU: {run.why_no_mfu}", faint=faint)
    dress(axes["tokens"], "Throughput", "tokens/s, all GPUs", "{x:,.0f}")
    draw_timing(axes["tokens"], run, "tokens_per_sec", ",.0f", absent="no tokens/s logged")
    dress(axes["time"], "Step time", "ms per iteration", "{x:,.0f}")
    draw_timing(axes["time"], run, "time_ms", ",.1f", absent="no step time logged")

    dress(axes["memory"], "GPU memory", "GB")
    memory = {"max_allocated_gb": "peak", "allocated_gb": "allocated"}
    if draw_columns(axes["memory"], run, memory, absent="no GPU memory logged"):
        axes["memory"].set_ylim(bottom=0)
    dress(axes["lr"], "Learning rate", "learning rate", "{x:.2e}")
    draw_columns(axes["lr"], run, {"lr": None}, absent="no learning rate logged")
    dress(axes["gradients"], "Gradient norm before clipping", "global L2 norm")
    absent = "no gradient norm logged (gradient_log_interval sets how often)"
    if draw_columns(axes["gradients"], run, {"grad_norm": None}, absent=absent):
        norms = run.columns["grad_norm"]
        figure.limit_y(axes["gradients"], drawn=[norms], typical=[norms])
    return fig


def dress(axis, title: str, ylabel: str, number_format: str | None = None):
    figure.dress(axis, title, ylabel, number_format, title_pad=20)  # leaves a line for the legend


def draw_loss(axis, run: Run):
    dress(axis, "Loss", "cross-entropy, nats per token")
    drawn = figure.draw(axis, run.columns["iter"], run.columns["loss"], alpha=0.8, label="training step")
    for name, marker, color in (("train", "s", "tab:green"), ("val", "D", "tab:red")):
        style = {"marker": marker, "markersize": 5, "linestyle": ":", "color": color}
        points = run_record.evaluations(run, f"{name}_loss")
        drawn |= figure.draw(axis, *points, label=f"evaluation, {name}", **style)
    if not drawn:
        return figure.say(axis, "no loss logged")
    for number, start in enumerate(run.attempt_starts):
        style = {"color": "gray", "linewidth": 1, "linestyle": "-."}
        axis.axvline(start - 0.5, label=None if number else "resumed", **style)
    figure.legend(axis)


def mfu_title(run: Run) -> str:
    """Names the formula and the peak: an MFU means nothing without them."""
    method = " and ".join(run.mfu_methods)
    peak, spread = run.peak_tflops_per_gpu, run_record.spread(run, "mfu_percent")
    parts = [
        f"MFU by {method}" if method else "MFU",
        f" of {peak:,.5g} TF per GPU" if peak else "",
        ", 2:4 sparse" if run.sparse else "",
        "\nabove 100 %: an error of measurement" if spread and spread[0] > 100 else "",
    ]
    return "".join(parts)


def draw_timing(axis, run: Run, name: str, number: str, absent: str, faint: dict[str, str] | None = None):
    """A column that hangs on step time: evaluations left out, warm-up shaded, the median of the rest marked.

    faint: further columns, {name: legend label}, drawn in the background.
    """
    shown = ~run.spoiled
    if not figure.draw(axis, run.columns["iter"][shown], run.columns[name][shown], color="tab:blue"):
        return figure.say(axis, absent)
    for other, label in (faint or {}).items():
        style = {"color": "tab:blue", "alpha": 0.35, "marker": ""}
        figure.draw(axis, run.columns["iter"][shown], run.columns[other][shown], label=label, **style)
    if spread := run_record.spread(run, name):
        median, low, high = (format(value, number) for value in spread)
        label = f"median {median}, p10 to p90: {low} to {high}"
        axis.axhline(spread[0], color="tab:orange", linewidth=1, linestyle="--", label=label)
    for number, (first, last) in enumerate(run.warmup_spans):  # one at each start
        label = None if number else "warm-up"
        axis.axvspan(first - 0.5, last + 0.5, color="gray", alpha=0.25, linewidth=0, label=label)
    typical = [run.columns[each][run.timed] for each in (name, *(faint or {}))]
    figure.limit_y(axis, drawn=[run.columns[name][shown]], typical=typical)
    figure.legend(axis)


def draw_columns(axis, run: Run, labels: dict[str, str | None], absent: str) -> bool:
    """Plain columns, {name: legend label}. False when none of them was logged."""
    for name, label in labels.items():
        figure.draw(axis, run.columns["iter"], run.columns[name], label=label)
    if not axis.lines:
        figure.say(axis, absent)
    figure.legend(axis)
    return bool(axis.lines)


def plot_all(patterns: list[str], output: str | None):
    paths = run_record.expand(patterns)
    if output and len(paths) > 1:
        raise run_record.PlotError(
            f"--output is one file, but {len(paths)} runs were given; plot them one by one"
        )
    target = figure.png_path(output) if output else None
    runs = [run_record.load_run(path) for path in paths]  # all, before the first PNG: a bad one stops here
    for run in runs:
        figure.save(plot(run), target or run.path.with_suffix(".png"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw each run record as one PNG beside it.")
    parser.add_argument("runs", nargs="+", metavar="RUN.json", help="run records, or globs of them")
    parser.add_argument("--output", metavar="PATH.png", help="where the PNG goes when there is one run")
    options = parser.parse_args(argv)
    return figure.exit_status(plot_all, options.runs, options.output)


if __name__ == "__main__":
    sys.exit(main())
