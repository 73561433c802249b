"""Draws the iso-FLOP curve: the predicted loss of every size at one number of FLOPs."""

from __future__ import annotations

from pathlib import Path

from plots.figure import literal, new_figure, save
from tools.plan.law import Law
from tools.plan.report import billions
from tools.plan.search import Plan

ABOVE = 0.12  # nats above the best plan that the curve shows: sizes beyond are of no interest


def draw(path: Path, law: Law, curves: dict[str, list[Plan]], flops: float, given: Plan | None) -> None:
    """`curves`: {arch: a plan for each size}; `given`: the plan of a model that the user named."""
    figure = new_figure(10, 6.5)
    axis = figure.subplots()
    low = min(plan.loss for plans in curves.values() for plan in plans)
    top = max(low + ABOVE, given.loss + 0.1 * ABOVE if given else 0)
    for i, (arch, plans) in enumerate(curves.items()):
        near = [plan for plan in plans if plan.loss <= top]
        best = min(plans, key=lambda plan: plan.loss)
        color = f"C{i}"
        label = f"{arch}: {_describe(best)}"
        axis.plot(
            [p.shape.parameters for p in near], [p.loss for p in near], color=color, label=literal(label)
        )
        axis.plot(best.shape.parameters, best.loss, "o", color=color, markersize=8)
    if given:
        label = f"this plan: {_describe(given)}"
        axis.plot(given.shape.parameters, given.loss, "*", color="black", markersize=14, label=literal(label))
    axis.set_xscale("log")
    axis.set_ylim(low - 0.08 * (top - low), top)
    axis.xaxis.set_major_formatter(lambda value, place: billions(value))
    axis.xaxis.set_minor_formatter(lambda value, place: "")
    axis.set_xticks(_ticks(*axis.get_xlim()))
    axis.set_xlabel("parameters")
    axis.set_ylabel("predicted loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, title="at the lowest point of each curve" if not given else None)
    figure.suptitle(
        literal(f"One budget, {flops:.4g} training FLOPs: loss by size of the model"), fontsize=13
    )
    axis.set_title(literal(f"{law}\n{law.source}"), fontsize=9, loc="left", color="dimgray")
    save(figure, path)


def _describe(plan: Plan) -> str:
    return (
        f"{billions(plan.shape.parameters)} parameters, {billions(plan.tokens)} tokens, loss {plan.loss:.3f}"
    )


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    found = [factor * 10.0**power for power in range(3, 16) for factor in (1, 2, 5)]
    return [value for value in found if low <= value <= high]
