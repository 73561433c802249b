"""What both plot scripts draw with: figures, axes, their limits, the PNG file and the exit status.

Figures are made without pyplot, so nothing needs a display.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
from run_record import PlotError, Run, evaluations, finite


def new_figure(width: float, height: float):
    """A figure that needs no display: without pyplot there is no backend to choose."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("matplotlib draws the plots and is not installed: pip install matplotlib") from None
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def dress(axis, title: str, ylabel: str, number_format: str | None = None, title_pad: float = 6):
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=title_pad)
    axis.set_xlabel("iteration")
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.3)
    axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if number_format:
        axis.yaxis.set_major_formatter(number_format)


def draw(axis, x: np.ndarray, y: np.ndarray, **style) -> bool:
    """A line through the points that exist, with markers while they are few. False when there are none."""
    there = np.isfinite(x) & np.isfinite(y)
    marker = {"marker": "o", "markersize": 4} if there.sum() <= 20 else {}
    if there.any():
        axis.plot(x[there], y[there], **{**marker, "linewidth": 1.3, **style})
    return bool(there.any())


def limit_x(axes: dict, runs: list[Run]):
    """The same iterations on every panel, and a sensible width when there is only one."""
    iters = [run.columns["iter"] for run in runs] + [evaluations(run, "val_loss")[0] for run in runs]
    iters = finite(np.concatenate(iters))
    if len(iters):
        pad = max(0.02 * (iters.max() - iters.min()), 0.5)
        for axis in axes.values():
            axis.set_xlim(iters.min() - pad, iters.max() + pad)


def limit_y(axis, drawn: list[np.ndarray], typical: list[np.ndarray]):
    """Fits the axis to the typical values of each line, so that one compilation step does not flatten the
    rest, and says how much of what was drawn is then off the scale."""
    drawn = finite(np.concatenate(drawn))
    bounds = [
        np.percentile(values, [1, 99], method="nearest") for values in map(finite, typical) if len(values)
    ] or [drawn]
    if not len(drawn):
        return
    low, high = min(map(min, bounds)), max(map(max, bounds))
    near = drawn[np.abs(drawn - (low + high) / 2) <= high - low]  # a point a little beyond is let in
    low, high = min([low, *near]), max([high, *near])
    pad = max(0.1 * (high - low), 0.05 * abs(high)) or 1.0
    bottom, top = max(low - pad, 0) if low >= 0 else low - pad, high + pad
    axis.set_ylim(bottom, top)
    outside = drawn[(drawn < bottom) | (drawn > top)]
    if len(outside):
        farthest = outside[np.argmax(np.abs(outside - (low + high) / 2))]
        number = f"{farthest:,.0f}" if abs(farthest) >= 1000 else f"{farthest:.4g}"
        note = f"{len(outside)} of {len(drawn)} points are off the scale, the farthest at {number}"
        axis.annotate(note, (0.99, 0.02), xycoords="axes fraction", ha="right", fontsize=8, color="dimgray")


def legend(axis):
    """Between the axis and its title, off the data."""
    if axis.get_legend_handles_labels()[0]:
        tight = {"borderpad": 0.1, "columnspacing": 1.2, "handlelength": 1.6, "fontsize": 8.5}
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, **tight)


def say(axis, text: str):
    """Explains an empty panel in place of its axis."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.grid(False)
    text = "\n".join(textwrap.wrap(text, 60))
    axis.text(0.5, 0.5, plain(text), transform=axis.transAxes, ha="center", va="center", color="dimgray")


def plain(text: str) -> str:
    """Text for matplotlib, which would read $...$ in a run name as a formula."""
    return text.replace("$", r"\$")


def save(figure, path: Path):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise PlotError(f"{path} cannot be written: {error.strerror or error}") from None
    print(f"wrote {path}")


def png_path(text: str) -> Path:
    """For argparse: an output path that says what is written there."""
    if not text.endswith(".png"):
        raise PlotError(f"--output {text} must end in .png")
    return Path(text)


def exit_status(work, *arguments) -> int:
    """Runs a script's work; a PlotError becomes one line on stderr and status 2."""
    try:
        work(*arguments)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
