"""Finds the best model for a budget, and the smaller ones for more tokens that cost the same."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import UserError
from tools.plan.law import Law
from tools.plan.shapes import Shape, nearest, shapes_of

OVERTRAINED = (0.75, 0.5, 0.35, 0.25)  # about so much of the compute-optimal size


@dataclass(frozen=True)
class Plan:
    shape: Shape
    tokens: float
    loss: float  # predicted, nats per token

    @property
    def flops(self) -> float:
        return self.tokens * self.shape.flops_per_token

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.shape.parameters


def plan(law: Law, shape: Shape, tokens: float) -> Plan:
    return Plan(shape, tokens, float(law.loss(shape.parameters, tokens)))


def plan_flops(law: Law, shape: Shape, flops: float) -> Plan:
    """The plan of a shape that costs so many FLOPs."""
    return plan(law, shape, flops / shape.flops_per_token)


def iso_flop(law: Law, shapes: tuple[Shape, ...], flops: float) -> list[Plan]:
    """A plan for each shape, of these FLOPs, that trains at least one sequence."""
    found = [plan_flops(law, shape, flops) for shape in shapes]
    return [each for each in found if each.tokens >= each.shape.model.block_size]


def best_plan(
    law: Law, arch: str, flops: float, vocab_size: int | None = None, block_size: int | None = None
) -> Plan:
    """The plan of least loss in a family. Raises UserError if it is the smallest or the largest shape: then
    the best one is outside of the family."""
    shapes = shapes_of(arch, vocab_size, *([block_size] if block_size else []))
    plans = iso_flop(law, shapes, flops)
    best = min(plans, key=lambda each: each.loss) if plans else None
    if best is None or best.shape.parameters == shapes[0].parameters:
        raise UserError(
            f"{flops:.3g} FLOPs are too few for the {arch} family, whose smallest shape has "
            f"{shapes[0].parameters:,} parameters; state a smaller --vocab_size, or more FLOPs"
        )
    if best.shape.parameters == shapes[-1].parameters:
        raise UserError(
            f"{flops:.3g} FLOPs are too many for the {arch} family, whose largest shape has "
            f"{shapes[-1].parameters:,} parameters; state fewer FLOPs"
        )
    return best


def overtrained(law: Law, arch: str, best: Plan) -> list[Plan]:
    """Smaller models for more tokens at the FLOPs of `best`, the largest first."""
    model = best.shape.model
    shapes = shapes_of(arch, model.vocab_size, model.block_size)
    chosen = {nearest(shapes, share * best.shape.parameters) for share in OVERTRAINED} - {best.shape}
    largest_first = sorted(chosen, key=lambda shape: -shape.parameters)
    return [plan_flops(law, shape, best.flops) for shape in largest_first]
