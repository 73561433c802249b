"""One PNG per run record: loss, MFU, tokens/s, step time, memory, GPU clock and power, learning rate and
gradient norm.

    python plots/plot_single_run.py out-qwen3-1.8b-b200/run_*.json

Reads only the JSON, so it works on a laptop, during a run and after a crash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from plots import figure, run_record  # noqa: E402
from plots.figure import Panel  # noqa: E402
from plots.run_record import Run  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_MARKS = 100  # anomalies, and checkpoints, that are marked


def plot(run: Run) -> Figure:
    """The figure of one run. What was not logged has no panel, but a line under the others that says why."""
    drawn = panels(run)
    fig = figure.new_figure(14, 4 + 3.7 * -(-sum(not panel.absent for panel in drawn) // 2))
    title = f"{run.name}\n{run.model} · {run.machine} · {run.precision} · {run.status}"
    fig.suptitle(figure.literal(title), fontsize=13)
    figure.draw_panels(fig, drawn, [run], first_wide=not drawn[0].absent)
    return fig


def panels(run: Run) -> list[Panel]:
    def missing(text: str, *names: str, timed: bool = False) -> str:
        """The text if none of these columns has a value."""
        rows = ~run.with_evaluation if timed else slice(None)
        return "" if any(len(run_record.finite(run.columns[name][rows])) for name in names) else text

    evaluated = any(len(run_record.evaluations(run, name)[0]) for name in ("train_loss", "val_loss"))
    why = {
        "Loss": "" if evaluated else missing("No loss was logged.", "loss"),
        "MFU": missing(f"No MFU: {run.why_no_mfu}", "mfu_percent", timed=True),
        "Throughput": missing("No tokens/s were logged.", "tokens_per_sec", timed=True),
        "Step time": missing("No step time was logged.", "time_ms", timed=True),
        "GPU memory": missing("No GPU memory was logged.", "max_allocated_gb", "allocated_gb"),
        "GPU clock and power": missing("No GPU clock was logged.", "sm_clock_mhz"),
        "Learning rate": missing("No learning rate was logged.", "lr"),
        "Gradient norm": missing("No gradient norm was logged.", "grad_norm"),
    }
    return [Panel(name, partial(DRAW[name], run=run), absent) for name, absent in why.items()]


def label_axis(axis: Axes, title: str, ylabel: str, number_format: str | None = None, lines: int = 1) -> None:
    figure.label_axis(axis, title, ylabel, number_format, title_pad=6 + 14 * lines)  # for the legend


def draw_loss(axis: Axes, run: Run) -> None:
    label_axis(axis, "Loss", "cross-entropy, nats per token", lines=2)
    lines = [(run.columns["iter"], run.columns["loss"])]
    figure.draw_smoothed(axis, *lines[0], color="tab:blue", label="training step")
    # a ring and a cross: both are seen where the two losses are equal
    for name, marker, color in (("train", "o", "tab:green"), ("val", "x", "tab:red")):
        style: dict[str, Any] = {"marker": marker, "markersize": 7, "linestyle": ":", "color": color}
        lines.append(run_record.evaluations(run, f"{name}_loss"))
        figure.draw(axis, *lines[-1], label=f"evaluation, {name}", markerfacecolor="none", **style)
    figure.limit_y(axis, [y for _, y in lines], [figure.after_the_beginning(*line) for line in lines])
    if run.tokens_per_iter:
        figure.add_token_axis(axis, run.tokens_per_iter)
    for index, start in enumerate(run.attempt_starts):
        style = {"color": "gray", "linewidth": 1, "linestyle": "-."}
        axis.axvline(start - 0.5, label=None if index else "resumed", **style)
    for index, (at, _) in enumerate(run_record.entries(run, "events")[:MOST_MARKS]):
        style = {"color": "tab:red", "linewidth": 1, "linestyle": ":"}
        axis.axvline(at, label=None if index else "anomaly", **style)
    if saved := [at for at, _ in run_record.entries(run, "checkpoints")[-MOST_MARKS:]]:
        style = {"color": "black", "marker": "^", "linestyle": "", "markersize": 6}
        axis.plot(
            saved, [0.01] * len(saved), transform=axis.get_xaxis_transform(), label="checkpoint", **style
        )
    figure.legend(axis)


def mfu_title(run: Run) -> str:
    """With the formula and the peak, because an MFU means nothing without them."""
    method = " and ".join(run.mfu_methods)
    peak, spread = run.peak_tflops_per_gpu, run_record.spread(run, "mfu_percent")
    parts = [
        f"MFU by {method}" if method else "MFU",
        f" of {peak:,.5g} TF per GPU" if peak else "",
        ", 2:4 sparse" if run.sparse else "",
        ", measured" if run.measured_peak else "",
        "\nabove 100 %: an error of measurement" if spread and spread[0] > 100 else "",
    ]
    return "".join(parts)


def draw_mfu(axis: Axes, run: Run) -> None:
    label_axis(axis, mfu_title(run), "MFU (%)")
    draw_timing(axis, run, "mfu_percent", ",.2f", faint={"mfu_causal_percent": "causal scores only"})


def draw_tokens(axis: Axes, run: Run) -> None:
    label_axis(axis, "Throughput", "tokens/s, all GPUs", "{x:,.0f}")
    draw_timing(axis, run, "tokens_per_sec", ",.0f")


def draw_time(axis: Axes, run: Run) -> None:
    label_axis(axis, "Step time", "ms per iteration", "{x:,.0f}")
    draw_timing(axis, run, "time_ms", ",.1f")


def draw_memory(axis: Axes, run: Run) -> None:
    label_axis(axis, "GPU memory", "GiB")
    draw_columns(axis, run, {"max_allocated_gb": "peak", "allocated_gb": "allocated"})
    axis.set_ylim(bottom=0)


def draw_clock(axis: Axes, run: Run) -> None:
    label_axis(axis, "GPU clock and power", "SM clock, MHz", "{x:,.0f}")
    style: dict[str, Any] = {"color": "tab:blue", "label": "clock, median over the row"}
    clocks, power = run.columns["sm_clock_mhz"], run_record.finite(run.columns["power_w"])
    figure.draw(axis, run.columns["iter"], clocks, **style)
    figure.limit_y(axis, drawn=[clocks], typical=[clocks])
    if len(power):
        second = axis.twinx()
        style = {"color": "tab:orange", "label": "power"}
        figure.draw(second, run.columns["iter"], run.columns["power_w"], **style)
        second.set_ylim(0, 1.1 * max(*power, 1.0))
        second.set_ylabel("W", color="tab:orange")
        axis.plot([], [], **style)  # for the legend
    figure.legend(axis)


def draw_lr(axis: Axes, run: Run) -> None:
    label_axis(axis, "Learning rate", "learning rate", "{x:.2e}")
    draw_columns(axis, run, {"lr": None})


def draw_gradients(axis: Axes, run: Run) -> None:
    label_axis(axis, "Gradient norm before clipping", "global L2 norm")
    draw_columns(axis, run, {"grad_norm": None})
    norms = run.columns["grad_norm"]
    figure.limit_y(axis, drawn=[norms], typical=[norms])


def draw_timing(axis: Axes, run: Run, name: str, number: str, faint: dict[str, str] | None = None) -> None:
    """A column that depends on the step time: without the steps that include an evaluation, with the warm-up
    shaded and the median of the other steps marked.

    number is the format of the median; faint are more columns, {name: legend label}, drawn in the background.
    """
    shown = ~run.with_evaluation
    figure.draw(axis, run.columns["iter"][shown], run.columns[name][shown], color="tab:blue")
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
    plain = shown & ~run.warmup  # an earlier attempt, which may have been faster, is in sight, too
    typical = [run.columns[each][plain] for each in (name, *(faint or {}))]
    figure.limit_y(axis, drawn=[run.columns[name][shown]], typical=typical)
    figure.legend(axis)


def draw_columns(axis: Axes, run: Run, labels: Mapping[str, str | None]) -> None:
    """Columns as they are, {name: legend label}."""
    for name, label in labels.items():
        figure.draw(axis, run.columns["iter"], run.columns[name], label=label)
    figure.legend(axis)


DRAW: dict[str, Callable[..., None]] = {
    "Loss": draw_loss,
    "MFU": draw_mfu,
    "Throughput": draw_tokens,
    "Step time": draw_time,
    "GPU memory": draw_memory,
    "GPU clock and power": draw_clock,
    "Learning rate": draw_lr,
    "Gradient norm": draw_gradients,
}


def plot_all(patterns: list[str], output: str | None) -> None:
    paths = run_record.expand_globs(patterns)
    if output and len(paths) > 1:
        raise UserError(f"--output is one file, but {len(paths)} runs were given; plot them one by one")
    target = figure.output_path(output) if output else None
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
