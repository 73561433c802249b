"""One PNG per run record: loss, MFU, tokens/s, step time, memory, GPU clock and power, learning rate and
gradient norm.

    python plots/plot_single_run.py out-qwen3-1.8b-b200/run_*.json

Reads only the JSON, so it works on a laptop, during a run and after a crash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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


TOKENS = ("tokens/s, all GPUs", "{x:,.0f}")
TIMES = ("ms per iteration", "{x:,.0f}")
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
    def panel(title: str, draw: Callable[..., None], absent: str, *names: str, **keys: Any) -> Panel:
        """Absent if none of these columns has a value."""
        shown = ~run.with_evaluation if draw is draw_timing else slice(None)
        is_logged = any(len(run_record.finite(run.columns[name][shown])) for name in names)
        return Panel(title, partial(draw, run=run, **keys), "" if is_logged else absent)

    timings = (
        ("mfu_percent", "MFU", (mfu_title(run), "MFU (%)"), ",.2f", f"No MFU: {run.why_no_mfu}"),
        ("tokens_per_sec", "Throughput", ("Throughput", *TOKENS), ",.0f", "No tokens/s were logged."),
        ("time_ms", "Step time", ("Step time", *TIMES), ",.1f", "No step time was logged."),
    )
    evaluated = any(len(run_record.evaluations(run, name)[0]) for name in ("train_loss", "val_loss"))
    return [
        panel("Loss", draw_loss, "" if evaluated else "No loss was logged.", "loss"),
        *(
            panel(title, draw_timing, absent, name, name=name, text=text, number=number)
            for name, title, text, number, absent in timings
        ),
        panel("GPU memory", draw_memory, "No GPU memory was logged.", "max_allocated_gb", "allocated_gb"),
        panel("GPU clock and power", draw_clock, "No GPU clock was logged.", "sm_clock_mhz"),
        panel("Learning rate", draw_lr, "No learning rate was logged.", "lr"),
        panel("Gradient norm", draw_gradients, "No gradient norm was logged.", "grad_norm"),
    ]


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


def draw_memory(axis: Axes, run: Run) -> None:
    label_axis(axis, "GPU memory", "GiB")
    for name, label in (("max_allocated_gb", "peak"), ("allocated_gb", "allocated")):
        figure.draw(axis, run.columns["iter"], run.columns[name], label=label)
    figure.legend(axis)
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
    figure.draw(axis, run.columns["iter"], run.columns["lr"])


def draw_gradients(axis: Axes, run: Run) -> None:
    label_axis(axis, "Gradient norm before clipping", "global L2 norm")
    norms = run.columns["grad_norm"]
    figure.draw(axis, run.columns["iter"], norms)
    figure.limit_y(axis, drawn=[norms], typical=[norms])


def draw_timing(axis: Axes, run: Run, name: str, text: tuple[Any, ...], number: str) -> None:
    """A column that depends on the step time: without the steps that include an evaluation, with the warm-up
    shaded and the median of the other steps marked, in the format `number`."""
    label_axis(axis, *text)
    shown, faint = ~run.with_evaluation, ["mfu_causal_percent"] if name == "mfu_percent" else []
    figure.draw(axis, run.columns["iter"][shown], run.columns[name][shown], color="tab:blue")
    for other in faint:
        style: dict[str, Any] = {
            "color": "tab:blue",
            "alpha": 0.35,
            "marker": "",
            "label": "causal scores only",
        }
        figure.draw(axis, run.columns["iter"][shown], run.columns[other][shown], **style)
    if spread := run_record.spread(run, name):
        median, low, high = (format(value, number) for value in spread)
        label = f"median {median}, p10 to p90: {low} to {high}"
        axis.axhline(spread[0], color="tab:orange", linewidth=1, linestyle="--", label=label)
    for index, (first, last) in enumerate(run.warmup_spans):  # one for each attempt
        in_legend = None if index else "warm-up"
        axis.axvspan(first - 0.5, last + 0.5, color="gray", alpha=0.25, linewidth=0, label=in_legend)
    plain = shown & ~run.warmup  # an earlier attempt, which may have been faster, is in sight, too
    typical = [run.columns[each][plain] for each in (name, *faint)]
    figure.limit_y(axis, drawn=[run.columns[name][shown]], typical=typical)
    figure.legend(axis)


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
