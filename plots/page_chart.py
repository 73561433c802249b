"""Places lines, ticks and markers of a chart in percent of its area; page.html draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from plots import figure

COLORS = 8  # of page.css; further lines have the same colors and are dashed
MOST_POINTS, LEAST_POINTS = 4_000, 200  # of all runs in one chart, and of a run: they decide the page's size
SIDE = 1000  # of the SVG, in its own units, whatever its size on the screen
DIGITS = 7  # of a number in the page, significant ones
BEYOND = 20.0  # heights of the area: what is drawn farther off the scale would only cost accuracy


@dataclass(frozen=True)
class Line:
    """What one line of a chart shows."""

    label: str
    run: int  # its place among the runs: what the switch of this run hides
    x: np.ndarray  # iterations, or tokens
    y: np.ndarray
    color: int
    style: str = "line"  # line, faint, dots; classes of page.css


@dataclass(frozen=True)
class Marker:
    """Something that happened at an iteration."""

    run: int
    x: float
    kind: str  # restart, anomaly, checkpoint
    text: str


@dataclass
class Chart:
    title: str
    unit: str
    number: str  # how a value is written: a format of Python's, which also tells page.js the digits
    lines: list[Line]
    typical: list[np.ndarray]
    subtitle: str = ""
    notes: list[str] = field(default_factory=list)
    over_tokens: bool = False
    tokens_per_iter: float | None = None  # for a second row of ticks
    wide: bool = False
    spans: Sequence[tuple[float, float]] = ()  # shaded: warm-up
    markers: Sequence[Marker] = ()


def draw(chart: Chart, limits: tuple[float, float], runs: int) -> dict[str, Any] | None:
    """What the page needs of a chart whose x axis has these limits; None if nothing is in it."""
    lines = [line for line in map(_existing, chart.lines) if len(line.x)]
    drawn = [line.y for line in lines]
    scale = figure.y_limits(drawn, chart.typical) if lines else None
    if scale is None:
        return None
    most = max(MOST_POINTS // runs, LEAST_POINTS)
    shown = [_thinned(line, most) for line in lines]
    beside = figure.off_the_scale(drawn, *scale)
    fewer = "" if all(map(np.array_equal, (line.x for line in shown), (line.x for line in lines))) else _FEWER
    x_name = "tokens" if chart.over_tokens else "iteration"
    return {
        "title": chart.title,
        "unit": chart.unit,
        "subtitle": chart.subtitle,
        "wide": chart.wide,
        "notes": [note for note in (*chart.notes, beside, fewer) if note],
        "x_name": x_name,
        "x_ticks": _token_ticks(limits, 1.0) if chart.over_tokens else _iteration_ticks(limits),
        "token_ticks": _token_ticks(limits, chart.tokens_per_iter),
        "y_ticks": [(_percent(tick, scale), text) for tick, text in _numbers(nice_ticks(*scale))],
        "lines": [{"line": line, "d": path(line, limits, scale), "classes": classes(line)} for line in shown],
        "spans": [_share(span, limits) for span in chart.spans if np.isfinite(span).all()],
        "markers": [
            (marker, _percent(marker.x, limits))
            for marker in chart.markers
            if limits[0] <= marker.x <= limits[1]
        ],
        "data": {
            "x": limits,
            "y": scale,
            "number": chart.number,
            "unit": chart.unit,
            "x_name": x_name,
            "tokens_per_iter": chart.tokens_per_iter,
            "lines": [
                {
                    "label": line.label,
                    "run": line.run,
                    "color": line.color % COLORS,
                    "style": line.style,
                    "x": _short(line.x),
                    "y": _short(line.y),
                }
                for line in shown
            ],
        },
    }


_FEWER = "too many rows for a page: of each piece of a line the lowest and the highest value are shown"


def classes(line: Line) -> str:
    dashed = " dashed" if line.color >= COLORS else ""
    return f"{line.style} c{line.color % COLORS} r{line.run}{dashed}"


def path(line: Line, x_limits: tuple[float, float], y_limits: tuple[float, float]) -> str:
    """The d of an SVG path. A dot is a line of no length with round ends, which keeps its shape when the SVG
    is stretched."""
    x = SIDE * (line.x - x_limits[0]) / (x_limits[1] - x_limits[0])
    y = SIDE * (y_limits[1] - line.y) / (y_limits[1] - y_limits[0])
    y = np.clip(y, -BEYOND * SIDE, BEYOND * SIDE)
    points = [f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True)]
    if line.style == "dots" or len(points) == 1:
        return "".join(f"M{point}h0" for point in points)
    return "M" + "L".join(points)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers between the limits, with steps of 1, 2 or 5 times a power of ten."""
    if not 1e-300 < high - low < math.inf:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _existing(line: Line) -> Line:
    """The points that exist, in the order of x, in which page.js searches."""
    exists = np.isfinite(line.x) & np.isfinite(line.y)
    order = np.argsort(line.x[exists], kind="stable")
    return replace(line, x=line.x[exists][order], y=line.y[exists][order])


def _thinned(line: Line, most: int) -> Line:
    """At most about `most` points: of each piece the lowest and the highest, so that no spike is lost."""
    if len(line.x) <= most:
        return line
    pieces = np.array_split(np.arange(len(line.x)), most // 2)
    ends = [(piece[line.y[piece].argmin()], piece[line.y[piece].argmax()]) for piece in pieces]
    found = {int(place) for pair in ends for place in pair}
    kept = sorted(found | {0, len(line.x) - 1})
    return replace(line, x=line.x[kept], y=line.y[kept])


def _short(values: np.ndarray) -> list[float | int]:
    numbers = [float(f"{value:.{DIGITS}g}") for value in values]
    return [int(number) if number.is_integer() and abs(number) < 1e15 else number for number in numbers]


def _percent(value: float, limits: tuple[float, float]) -> float:
    return round(100 * (value - limits[0]) / (limits[1] - limits[0]), 3)


def _share(span: tuple[float, float], limits: tuple[float, float]) -> tuple[float, float]:
    """Left edge and width of a span of iterations, in percent of the area."""
    left, right = (min(max(_percent(value, limits), 0.0), 100.0) for value in (span[0] - 0.5, span[1] + 0.5))
    return left, round(right - left, 3)


def _iteration_ticks(limits: tuple[float, float]) -> list[tuple[float, str]]:
    ticks = [tick for tick in nice_ticks(*limits) if abs(tick - round(tick)) < 1e-6]  # there is no half one
    return [(_percent(tick, limits), f"{tick:,.0f}") for tick in ticks]


def _token_ticks(limits: tuple[float, float], tokens_per_iter: float | None) -> list[tuple[float, str]]:
    """On an axis of iterations."""
    if not tokens_per_iter:
        return []
    low, high = (limit * tokens_per_iter for limit in limits)
    return [(_percent(tick, (low, high)), figure.tokens_text(tick)) for tick in nice_ticks(low, high)]


def _numbers(ticks: list[float]) -> list[tuple[float, str]]:
    """The ticks of a y axis and their texts, all with as many decimals as their step needs."""
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 0.0
    if step < 1e-4 or max(map(abs, ticks)) >= 1e7:
        return [(tick, f"{tick:.4g}") for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(tick, f"{tick:,.{decimals}f}") for tick in ticks]
