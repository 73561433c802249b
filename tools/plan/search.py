"""Finds the best model for a budget, and the smaller ones for more tokens that cost the same."""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.law import Law
from tools.plan.shapes import Shape, nearest

OVERTRAINED = (0.75, 0.5, 0.35, 0.25)  # about so much of the compute-optimal size


@dataclass(frozen=True)
class Plan:
    shape: Shape
    tokens: float
    loss: float  # predicted, nats per token

    @property
    def flops(self) -> float:
        return self.tokens * self.shape.flops_per_token


def plan(law: Law, shape: Shape, tokens: float) -> Plan:
    return Plan(shape, tokens, float(law.loss(shape.parameters, tokens)))


def plan_flops(law: Law, shape: Shape, flops: float) -> Plan:
    """The plan of a shape that costs so many FLOPs."""
    return plan(law, shape, flops / shape.flops_per_token)


def plans_of(law: Law, shapes: tuple[Shape, ...], flops: float) -> list[Plan]:
    """The compute-optimal plan of a family, and then smaller models for more tokens at the same FLOPs."""
    best = min((plan_flops(law, shape, flops) for shape in shapes), key=lambda each: each.loss)
    wanted = (share * best.shape.parameters for share in OVERTRAINED)
    smaller = dict.fromkeys(nearest(shapes, size) for size in wanted)
    return [best, *(plan_flops(law, shape, flops) for shape in smaller if shape != best.shape)]
