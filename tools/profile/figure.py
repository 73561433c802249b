"""Draws a profile: the parts of an iteration, and the way from the peak to the measured MFU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from plots.figure import literal, new_figure, save
from tools.profile.parts import group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "clock": "tab:gray",
    "ceiling": "tab:cyan",
    "matmuls": "tab:blue",
    "attention": "tab:orange",
    "recomputation": "tab:brown",
    "memory-bound": "tab:green",
    "communication": "tab:red",
    "ranks": "tab:pink",
    "idle": "black",
    "profiler": "tab:olive",
}
SMALLEST = 0.2  # percent of an iteration; smaller parts are one bar together


def draw(content: dict[str, Any], path: Path) -> None:
    figure = new_figure(15, 8)
    left, right = figure.subplots(1, 2)
    found = content["profiled"]
    figure.suptitle(literal(f"{content['device']}: {found['wall_ms']:.1f} ms per iteration"), fontsize=13)
    _parts(left, found["parts"])
    _waterfall(right, content["waterfall"])
    save(figure, path)


def _parts(axis: Axes, rows: list[dict[str, Any]]) -> None:
    large = [row for row in rows if row["percent"] >= SMALLEST]
    small = sum(row["ms"] for row in rows) - sum(row["ms"] for row in large)
    names = [row["part"] for row in large] + ["all others"]
    values = [row["ms"] for row in large] + [small]
    colors = [COLORS[group_of(name)] for name in names[:-1]] + ["lightgray"]
    axis.barh(range(len(names)), values, color=colors)
    axis.set_yticks(range(len(names)), [literal(name) for name in names], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms per iteration")
    axis.set_title("Parts", loc="left", fontweight="bold")
    axis.grid(alpha=0.3, axis="x")


def _waterfall(axis: Axes, found: dict[str, Any]) -> None:
    in_points = found["unit"] == "points"
    start = 100.0 if in_points else 0.0
    labels, now = (["peak"], start) if in_points else ([], start)
    if in_points:
        axis.bar(0, start, color="lightgray")
    for step in found["steps"]:
        if step["ms"] is None:
            continue
        change = -step["points"] if in_points else step["ms"]
        axis.bar(len(labels), change, bottom=now, color=COLORS[step["step"]])
        top = max(now, now + change)
        now += change
        axis.text(len(labels), top, f"{change:+.1f}", ha="center", va="bottom", fontsize=8)
        labels.append(step["label"])
    axis.bar(len(labels), now, color="lightgray")
    labels.append(f"MFU {now:.2f} %" if in_points else f"{now:.1f} ms")
    axis.set_xticks(
        range(len(labels)), [literal(label) for label in labels], rotation=40, ha="right", fontsize=8
    )
    axis.use_sticky_edges = False  # they would end the axis at the bars' own ends, such as 100
    axis.margins(y=0.08)  # room for the numbers above the bars
    axis.set_ylim(bottom=0)
    axis.set_ylabel("% of the peak" if in_points else "ms per iteration")
    axis.set_title(
        "From the peak to the MFU" if in_points else "Where the time goes", loc="left", fontweight="bold"
    )
    axis.grid(alpha=0.3, axis="y")
