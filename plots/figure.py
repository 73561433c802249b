"""Drawing for the PNGs and the page: panels, figures, axes and their limits, files.

A panel is drawn by one function, into its place in a PNG or into an SVG of its own."""

from __future__ import annotations

import functools
import io
import os
import textwrap
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


SVG_INCHES = (7.2, 3.7)
MOST_POINTS, LEAST_POINTS = 4_000, 200  # of all runs, and of a run, whose values the page can tell
DIGITS = 7  # of these values, significant ones


class Panel(NamedTuple):
    title: str
    draw: Callable[[Axes], None]
    absent: str = ""  # why nothing would be in it: it is not drawn then, and this is said under the others


# --- figures and files ---


def draw_panels(figure: Figure, panels: list[Panel], runs: list[Run], first_wide: bool = False) -> None:
    """Two panels in a row; one that is alone in its row takes all of it. What is absent is a line below."""
    shown = {panel.title: panel for panel in panels if not panel.absent}
    names = list(shown)
    rows = [names[:1]] if first_wide else []
    rest = names[len(rows) :]
    rows += [rest[i : i + 2] for i in range(0, len(rest), 2)]
    layout: list[Any] = [row * 2 if len(row) == 1 else row for row in rows]
    axes = figure.subplot_mosaic(layout) if names else {}
    for name, axis in axes.items():
        limit_x(axis, runs)
        shown[name].draw(axis)
    lines = [part for panel in panels for part in textwrap.wrap(panel.absent, 150)]
    figure.supxlabel(literal("\n".join(lines)), fontsize=9, color="dimgray")


def svg(panel: Panel, runs: list[Run]) -> tuple[str, dict[str, Any]]:
    """The panel as SVG, which names no other file, and what a script needs to tell its values: the place of
    its axes in percent of the image (left, top, width, height), the limits of x, and the lines."""
    from matplotlib import rc_context

    figure = new_figure(*SVG_INCHES)
    axis = figure.subplots()
    limit_x(axis, runs)
    panel.draw(axis)
    text, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanoMFU"}):
        figure.savefig(text, format="svg", metadata=nothing)
    place = axis.get_position()
    most = max(MOST_POINTS // len(runs), LEAST_POINTS)
    drawn = [line for each in figure.axes for line in each.lines if line.get_transform() is each.transData]
    return text.getvalue(), {
        "title": panel.title,
        "area": [round(100 * at, 3) for at in (place.x0, 1 - place.y1, place.width, place.height)],
        "x": axis.get_xlim(),
        "x_name": axis.get_xlabel(),
        "lines": [values(line, panel.title, most) for line in drawn if np.size(line.get_xdata())],
    }


def values(line: Line2D, title: str, most: int) -> dict[str, Any]:
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
    label = str(line.get_label())
    points = {name: [float(f"{v:.{DIGITS}g}") for v in each[order]] for name, each in (("x", x), ("y", y))}
    return {
        "label": title if label.startswith("_child") else label.lstrip("_"),
        "color": to_hex(line.get_color()),
        **points,
    }


def new_figure(width: float, height: float) -> Figure:
    """A figure that needs no display: pyplot, which would choose a backend, is not used."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("matplotlib draws the plots and is not installed: pip install matplotlib") from None
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def label_axis(
    axis: Axes, title: str, ylabel: str, number_format: str | None = None, title_pad: float = 6
) -> None:
    """Title, axis labels and grid."""
    axis.set_title(literal(title), loc="left", fontsize=11, fontweight="bold", pad=title_pad)
    axis.set_xlabel("iteration")
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.3)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    if number_format:
        axis.yaxis.set_major_formatter(number_format)


def draw(axis: Axes, x: np.ndarray, y: np.ndarray, **style: Any) -> bool:
    """A line through the points that exist, with markers if these are few. False if there are none."""
    exists = np.isfinite(x) & np.isfinite(y)
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if exists.sum() <= 20 else {}
    if exists.any():
        axis.plot(x[exists], y[exists], **{**marker, "linewidth": 1.3, **style})
    return bool(exists.any())


def draw_smoothed(axis: Axes, x: np.ndarray, y: np.ndarray, label: str, **style: Any) -> None:
    """The running mean of the points, in front of a faint line through all of them, which no legend names."""
    exists = np.isfinite(x) & np.isfinite(y)
    x, y = x[exists], y[exists]
    window = len(y) // 50
    if window < 2:
        draw(axis, x, y, label=label, **style)
        return
    draw(axis, x, y, **{**style, "label": f"_{label}", "alpha": 0.25, "linewidth": 0.8, "linestyle": "-"})
    draw(axis, x, running_mean(y, window), label=f"{label}, mean of {window}", **style)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of about `window` values around each; fewer at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    first, last = np.maximum(places - window // 2, 0), np.minimum(places + window // 2 + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def add_token_axis(axis: Axes, tokens_per_iter: float) -> None:
    """A second axis below that of the iterations. A loss of iteration i, of training or of an evaluation, is
    that of weights which have seen the tokens of i iterations: both are measured before its update."""

    def tokens(iteration: Any) -> Any:
        return np.asarray(iteration) * tokens_per_iter

    def iteration(tokens: Any) -> Any:
        return np.asarray(tokens) / tokens_per_iter

    second = axis.secondary_xaxis(-0.2, functions=(tokens, iteration))
    second.set_xlabel("tokens")
    second.xaxis.set_major_formatter(tokens_text)


def tokens_text(value: float, place: float | None = None) -> str:
    """'1.4 B', for the ticks of an axis of tokens, and with `place` also as a formatter of matplotlib's."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


def show_tokens(axis: Axes) -> None:
    """For a panel over tokens: its own limits and label, instead of those of the iterations."""
    axis.set_xlabel("tokens")
    axis.autoscale(axis="x")
    axis.xaxis.set_major_formatter(tokens_text)


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
    """The values after the first tenth, in which a loss falls so far that the rest would look flat."""
    exists = np.isfinite(x) & np.isfinite(y)
    x, y = x[exists], y[exists]
    return y[x >= 0.1 * x.max()] if len(x) else y


def limit_x(axis: Axes, runs: list[Run]) -> None:
    """Shows the same iterations on every panel; if there is only one, with some room beside it."""
    logged = [run.columns["iter"] for run in runs] + [evaluations(run, "val_loss")[0] for run in runs]
    iters = finite(np.concatenate(logged))
    if len(iters):
        pad = max(0.02 * (iters.max() - iters.min()), 0.5)
        axis.set_xlim(iters.min() - pad, iters.max() + pad)


def limit_y(axis: Axes, drawn: list[np.ndarray], typical: list[np.ndarray]) -> None:
    """Fits the axis to the typical values, and notes on the panel how many points are then off the scale."""
    if limits := y_limits(drawn, typical, axis.get_yscale() == "log"):
        axis.set_ylim(*limits)
        if text := off_the_scale(drawn, *limits):
            style: dict[str, Any] = {"ha": "right", "fontsize": 8, "color": "dimgray"}
            axis.annotate(text, (0.99, 0.02), xycoords="axes fraction", **style)


def y_limits(
    drawn: list[np.ndarray], typical: list[np.ndarray], is_logarithmic: bool = False
) -> tuple[float, float] | None:
    """The limits that fit the typical values of each line, so that one compilation step does not flatten the
    rest; None if nothing is drawn."""
    points = finite(np.concatenate(drawn))
    bounds = [
        np.percentile(values, [1, 99], method="nearest") for values in map(finite, typical) if len(values)
    ] or [points]
    if not len(points):
        return None
    low, high = min(map(min, bounds)), max(map(max, bounds))
    near = points[np.abs(points - (low + high) / 2) <= high - low]  # shows points a little beyond, too
    low, high = float(min([low, *near])), float(max([high, *near]))
    pad = max(0.1 * (high - low), 0.05 * abs(high)) or 1.0
    bottom, top = max(low - pad, 0) if low >= 0 else low - pad, high + pad
    return (max(bottom, low / 2) if is_logarithmic else bottom), top  # 0 has no place on a logarithmic axis


def off_the_scale(drawn: list[np.ndarray], bottom: float, top: float) -> str:
    """How many points are outside these limits, and the farthest of them; an empty text if none is."""
    points = finite(np.concatenate(drawn))
    outside = points[(points < bottom) | (points > top)]
    if not len(outside):
        return ""
    farthest = outside[np.argmax(np.abs(outside - (bottom + top) / 2))]
    number = f"{farthest:,.0f}" if abs(farthest) >= 1000 else f"{farthest:.4g}"
    return f"{len(outside)} of {len(points)} points are off the scale, the farthest at {number}"


def legend(axis: Axes) -> None:
    """Puts the legend between the axis and its title, where it hides no data."""
    if axis.get_legend_handles_labels()[0]:
        tight: dict[str, Any] = {"borderpad": 0.1, "columnspacing": 1.2, "handlelength": 1.6, "fontsize": 8.5}
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, **tight)


def legend_lines(styles: list[dict[str, Any]]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [Line2D([], [], linewidth=2.5, **style) for style in styles]


def literal(text: str) -> str:
    """The text as matplotlib shows it: with escaped dollars, because it would read $...$ in a run name as a
    formula; and with a question mark for what its font lacks, emoji for example, because it would warn."""
    known = _font_characters()
    shown = "".join(c if ord(c) in known or c == "\n" else "?" for c in text)
    return shown.replace("$", r"\$")


@functools.cache
def _font_characters() -> frozenset[int]:
    """What both weights have: the titles of the panels are bold."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    regular, bold = (
        get_font(findfont(FontProperties(weight=weight))).get_charmap() for weight in ("normal", "bold")
    )
    return frozenset(regular.keys() & bold.keys())


def save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {os_error_text(error)}") from None
    print(f"wrote {plain(str(path))}")


def output_path(text: str, ending: str = ".png") -> Path:
    """The path after --output. Raises UserError if its ending is not that of the format."""
    if not text.endswith(ending):
        raise UserError(f"--output {text} must end in {ending}")
    return Path(os.path.expanduser(text))
