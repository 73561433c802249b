"""Drawing for the PNGs and the page: figures, axes and their limits, files.

A panel is drawn by one function, into its place in a PNG or into an SVG of its own."""

from __future__ import annotations

import io
import math
import os
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common.errors import UserError, os_error_text
from common.text import plain
from plots.run_record import Run, evaluations, finite

if TYPE_CHECKING:  # matplotlib is imported where it is used, so that its absence is one clear error
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


SVG_INCHES = (6.0, 3.4)
MOST_POINTS, LEAST_POINTS = 4_000, 200  # of all runs, and of a run, whose values the page can tell
FEW_POINTS = 50  # of a run that is short


class Panel(NamedTuple):
    title: str
    draw: Callable[[Axes], None]
    absent: str = ""  # why nothing would be in it: it is not drawn then, and this is said under the others


# --- figures and files ---


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no display: pyplot, which would choose a backend, is not used."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("matplotlib draws the plots and is not installed: pip install matplotlib") from None
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def panels_figure(panels: list[Panel], runs: list[Run]) -> Figure:
    """The first panel, and then two in a row; one that is alone in its row takes all of it. What is absent is
    a line below."""
    shown = [panel for panel in panels if not panel.absent]
    rows = 1 + math.ceil((len(shown) - 1) / 2) if shown else 0
    figure = new_figure(14, 3 + 3.8 * rows + 0.2 * len(runs))  # a line each in the legend
    grid = figure.add_gridspec(max(rows, 1), 2)
    for number, panel in enumerate(shown):
        row, column = divmod(number + 1, 2)
        alone = number == 0 or (column == 0 and panel is shown[-1])
        place = (row, slice(None)) if alone else (row, column)
        draw_panel(figure.add_subplot(grid[place]), panel, runs)
    lines = [part for panel in panels for part in textwrap.wrap(panel.absent, 150)]
    figure.supxlabel(literal("\n".join(lines)), fontsize=9, color="dimgray")
    return figure


def draw_panel(axis: Axes, panel: Panel, runs: list[Run]) -> None:
    """Over the same iterations on every panel; if there is only one, with some room beside it."""
    logged = [run.columns["iter"] for run in runs] + [evaluations(run, "val_loss")[0] for run in runs]
    iters = finite(np.concatenate(logged))
    if len(iters):
        pad = max(0.02 * (iters.max() - iters.min()), 0.5)
        axis.set_xlim(iters.min() - pad, iters.max() + pad)
    panel.draw(axis)


def svg(panel: Panel, runs: list[Run]) -> tuple[str, dict[str, Any]]:
    """The panel as SVG, which names no other file, and what a script needs to tell its values: the place of
    its axes in percent of the image (left, top, width, height), the limits of x, and the lines."""
    from matplotlib import rc_context

    figure = new_figure(*SVG_INCHES)
    axis = figure.subplots()
    draw_panel(axis, panel, runs)
    text, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanoMFU"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(text, format="svg", metadata=nothing)
    place = axis.get_position()
    most = max(MOST_POINTS // len(runs), LEAST_POINTS)
    drawn = [line for line in axis.lines if line.get_transform() is axis.transData]
    return text.getvalue(), {
        "title": panel.title,
        "area": [round(100 * at, 3) for at in (place.x0, 1 - place.y1, place.width, place.height)],
        "x": axis.get_xlim(),
        "x_name": axis.get_xlabel(),
        "lines": [values(line, most) for line in drawn],
    }


def values(line: Line2D, most: int) -> dict[str, Any]:
    """Of at most about `most` points: the lowest and the highest of each piece of the line, so that no spike
    is lost."""
    from matplotlib.colors import to_hex

    x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    order = np.argsort(x, kind="stable")  # in which the script searches
    if len(order) > most:
        pieces = np.array_split(y[order], most // 2)
        starts = np.cumsum([0, *map(len, pieces[:-1])])
        ends = [(piece.argmin(), piece.argmax()) for piece in pieces]
        order = order[np.unique([0, *(np.array(ends) + starts[:, None]).ravel(), len(order) - 1])]
    points = {name: [float(f"{v:.7g}") for v in each[order]] for name, each in (("x", x), ("y", y))}
    return {"label": str(line.get_label()).lstrip("_"), "color": to_hex(line.get_color()), **points}


def save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a character that the font lacks is a box
            figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {os_error_text(error)}") from None
    print(f"wrote {plain(str(path))}")


def output_path(text: str, ending: str = ".png") -> Path:
    """The path after --output. Raises UserError if its ending is not that of the format."""
    if not text.endswith(ending):
        raise UserError(f"--output {text} must end in {ending}")
    return Path(os.path.expanduser(text))


# --- lines and texts ---


def label_axis(axis: Axes, title: str, ylabel: str, form: str | None = None, title_pad: float = 6) -> None:
    """Title, axis labels and grid."""
    title = textwrap.fill(literal(title), 54)
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=title_pad)
    axis.set_xlabel("iteration")
    axis.set_ylabel(ylabel, labelpad=8)  # a browser's font may be wider than matplotlib's
    axis.grid(alpha=0.3)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    if form:
        axis.yaxis.set_major_formatter(form)


def draw(axis: Axes, x: np.ndarray, y: np.ndarray, label: str, smooth: bool = False, **style: Any) -> None:
    """A line through the points that exist, with markers if these are few. smooth: their running mean, in
    front of a faint line through all of them, which no legend names."""
    exists = np.isfinite(x) & np.isfinite(y)
    x, y, window = x[exists], y[exists], len(y[exists]) // 50
    if smooth and window > 1:
        faint = {"label": f"_{label}", "alpha": 0.25, "linewidth": 0.8, "linestyle": "-"}
        axis.plot(x, y, **{**style, **faint})
        sums, places = np.concatenate([[0.0], np.cumsum(y)]), np.arange(len(y))
        first, last = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(y))
        y = (sums[last] - sums[first]) / (last - first)  # of fewer at both ends
        label = f"{label}, mean of {window}"
    few: dict[str, Any] = {"marker": "o", "markersize": 4} if len(y) <= 20 else {}
    if len(y):
        axis.plot(x, y, **{**few, "linewidth": 1.3, "label": label, **style})


def legend(axis: Axes) -> None:
    """Puts the legend between the axis and its title, where it hides no data."""
    if axis.get_legend_handles_labels()[0]:
        tight: dict[str, Any] = {"borderpad": 0.1, "columnspacing": 1.2, "handlelength": 1.6, "fontsize": 8}
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, **tight)


def literal(text: str) -> str:
    """The text as matplotlib shows it: it would read $...$ in a run name as a formula."""
    return text.replace("$", r"\$")


def tokens_text(value: float, place: float | None = None) -> str:
    """'1.4 B', for the ticks of an axis of tokens, and with `place` also as a formatter of matplotlib's."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


# --- axes and their limits ---


def make_logarithmic(axis: Axes, drawn: list[np.ndarray]) -> None:
    """A logarithmic y axis, with plain numbers at its ticks, if all values are positive."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    points = finite(np.concatenate(drawn))
    if len(points) and points.min() > 0:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(MaxNLocator(8))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")


def after_the_beginning(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The values after the first tenth, in which a loss falls so far that the rest would look flat. Of a
    short run all of them: its fall is what there is to see."""
    exists = np.isfinite(x) & np.isfinite(y)
    x, y = x[exists], y[exists]
    return y[x >= 0.1 * x.max()] if len(x) >= FEW_POINTS else y


def limit_y(axis: Axes, drawn: list[np.ndarray], typical: list[np.ndarray]) -> None:
    """Fits the axis to the typical values of each line, so that one compilation step does not flatten the
    rest, and notes on the panel how many points are then off the scale."""
    points = finite(np.concatenate(drawn))
    if not len(points):
        return
    known = [values for values in map(finite, typical) if len(values)] or [points]
    bounds = np.array([np.percentile(values, [1, 99], method="nearest") for values in known])
    low, high = bounds[:, 0].min(), bounds[:, 1].max()
    near = points[np.abs(points - (low + high) / 2) <= high - low]  # shows points a little beyond, too
    low, high = float(min([low, *near])), float(max([high, *near]))
    pad = max(0.1 * (high - low), 0.05 * abs(high)) or 1.0
    bottom, top = max(low - pad, 0) if low >= 0 else low - pad, high + pad
    if axis.get_yscale() == "log":
        bottom = max(bottom, low / 2)  # 0 has no place there
    axis.set_ylim(bottom, top)
    outside = points[(points < bottom) | (points > top)]
    if len(outside):
        farthest = outside[np.argmax(np.abs(outside - (bottom + top) / 2))]
        text = f"{len(outside)} of {len(points)} points off the scale, to {farthest:,.6g}"
        style: dict[str, Any] = {"ha": "right", "fontsize": 8, "color": "dimgray", "annotation_clip": False}
        axis.annotate(text, (1, 0), (0, -26), "axes fraction", "offset points", **style)
