"""What a plan says on the console."""

from __future__ import annotations

import math

from common.text import aligned
from tools.plan.fit import INTERVAL, Fit
from tools.plan.law import Law
from tools.plan.machine import Machine
from tools.plan.points import Point
from tools.plan.search import Plan

TEXT_COLUMNS = ("arch", "shape", "run", "constant")
SHAPE = "shape: layers-heads-width-ff, KV heads"


def law_lines(law: Law) -> list[str]:
    return [f"law: {law} ({law.source}; N: all parameters, D: tokens, L: nats per token)"]


def budget_lines(flops: float, machine: Machine | None) -> list[str]:
    lines = [f"budget: {flops:.4g} training FLOPs by v3 (every matmul, the full score matrix)"]
    if machine:
        hours = machine.hours(flops)
        lines.append(f"machine: {machine}")
        lines.append(f"time: {amount(hours)} hours, {amount(hours * machine.gpus)} GPU-hours")
    return lines


def best_lines(plans: list[Plan]) -> list[str]:
    head = ["arch", "shape", "parameters", "FLOPs/token", "tokens", "tokens/parameter", "loss"]
    rows = [
        [
            plan.shape.name,
            str(plan.shape),
            billions(plan.shape.parameters),
            f"{plan.shape.flops_per_token:.4g}",
            billions(plan.tokens),
            f"{plan.tokens_per_parameter:.1f}",
            f"{plan.loss:.3f}",
        ]
        for plan in plans
    ]
    return ["", f"Compute-optimal ({SHAPE})", *aligned(head, rows, TEXT_COLUMNS)]


def overtrained_lines(best: Plan, plans: list[Plan]) -> list[str]:
    if not plans:
        return []
    head = ["shape", "parameters", "of optimal", "tokens", "loss", "loss given up", "FLOPs/token of optimal"]
    rows = [
        [
            str(plan.shape),
            billions(plan.shape.parameters),
            f"{100 * plan.shape.parameters / best.shape.parameters:.0f} %",
            billions(plan.tokens),
            f"{plan.loss:.3f}",
            f"{plan.loss - best.loss:.4f}",
            f"{100 * plan.shape.flops_per_token / best.shape.flops_per_token:.0f} %",
        ]
        for plan in plans
    ]
    title = f"Over-trained {best.shape.name}: smaller models for more tokens at the same FLOPs"
    return ["", title, *aligned(head, rows, TEXT_COLUMNS)]


def model_lines(plan: Plan, fitted: Fit | None) -> list[str]:
    shape = plan.shape
    lines = [
        f"model: {shape.name}, {SHAPE.removeprefix('shape: ')}: {shape}",
        f"parameters: {shape.parameters:,}",
        f"tokens: {plan.tokens:,.0f}, {plan.tokens_per_parameter:.1f} per parameter",
        f"FLOPs: {plan.flops:.6g} by v3 ({shape.flops_per_token:,} per token); 6ND would be "
        f"{6 * shape.parameters * plan.tokens:.4g}",
        f"predicted loss: {plan.loss:.3f}",
    ]
    return lines + interval_lines(plan, fitted)


def interval_lines(plan: Plan, fitted: Fit | None) -> list[str]:
    if fitted is None:
        return []
    low, high = fitted.loss_interval(plan.shape.parameters, plan.tokens)
    return [f"90 % interval of the predicted loss ({plan.shape.name}): {low:.3f} to {high:.3f}"]


def fit_lines(fitted: Fit, points: list[Point]) -> list[str]:
    head = ["run", "parameters", "tokens", "loss", "fitted", "difference"]
    rows = [
        [
            point.name,
            f"{point.parameters:,}",
            f"{point.tokens:,.0f}",
            f"{point.loss:.4f}",
            f"{(found := fitted.law.loss(point.parameters, point.tokens)):.4f}",
            f"{found - point.loss:+.4f}",
        ]
        for point in points
    ]
    lines = [f"Fit to {len(points)} runs", *aligned(head, rows, TEXT_COLUMNS), ""]
    table = []
    for name in ("E", "A", "B", "alpha", "beta"):
        fixed = fitted.constants == 3 and name in ("alpha", "beta")
        interval = "fixed" if fixed else "{:.4g} to {:.4g}".format(*fitted.interval(name))
        table.append([name, f"{getattr(fitted.law, name):.4g}", interval])
    between = f"{INTERVAL[1] - INTERVAL[0]} % interval"
    lines += aligned(["constant", "value", between], table, TEXT_COLUMNS)
    lines.append(f"interval: of the fits to {len(fitted.resampled)} resamples of the runs, with replacement")
    if fitted.constants == 3:
        lines.append(
            "fixed: alpha and beta are those of Hoffmann et al.; to fit them, too, takes 7 runs or more, of "
            "3 sizes and 3 numbers of tokens"
        )
    return [*lines, *(f"warning: {point.warning}" for point in points if point.warning), ""]


def caveat_lines(law: Law, plans: list[Plan]) -> list[str]:
    beyond = [line for plan in plans for line in law.beyond(plan.shape.parameters, plan.tokens)]
    for plan in plans:
        vocab_size = plan.shape.model.vocab_size
        guess = math.log(vocab_size)
        if plan.loss > guess:
            beyond.append(
                f"a loss of {plan.loss:.3f} is above that of a random guess, ln({vocab_size}) = "
                f"{guess:.3f}: the law does not hold for this plan"
            )
    return ["", *(f"note: {line}" for line in dict.fromkeys([*law.caveats, *beyond]))]


def billions(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.4g}"


def amount(value: float) -> str:
    """Hours: three digits, or all that are before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
