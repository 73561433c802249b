"""Finds which of the model's matmuls an operation is, by its shapes and by where it was launched.

A Linear with K inputs and N outputs is three products for M tokens: forward (M, K) x (K, N), dgrad (M, N) x
(N, K), wgrad (N, M) x (M, K). Shapes alone do not always tell them apart: GPT-2's up and down are each
other's transpose. So the place decides first: in the forward of autograd is the forward, in its backward are
the two others. The head, which makes its gradients in the forward, has a function of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.roofline import matmul_shapes
from tools.profile.trace import Place, Shape
from training.configuration.keys import TrainConfig

# {operator: which of its tensors are the two factors}
OPERATORS = {
    "aten::mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::addmm_": (1, 2),
    "aten::_scaled_mm": (0, 1),
    "aten::_scaled_mm_v2": (0, 1),
}
# This calls cuBLASLt itself. The factors are the first tensor and the second or its transpose.
OWN_OPERATORS = ("nanomfu::add_float8_weight_gradient",)
# These are QuACK's (ops/quack.py): each is one matmul of the model, whatever its shapes.
FUSED_OPERATORS = {
    "nanomfu::activated_matmul": ("up", "forward"),
    "nanomfu::activation_backward_matmul": ("down", "dgrad"),
}
DIRECTIONS = ("forward", "recompute", "dgrad", "wgrad")
HEAD = "head"
NAMES = {"lm_head": HEAD}  # of a module: the name that is shown
HEAD_FUNCTION = "LinearCrossEntropy"
WEIGHT_GRADIENT = "weight_gradient"  # in the names of the operators that add one to its sum


class Linears(NamedTuple):
    """Every Linear of the model, and the tokens of a micro-step."""

    tokens: int
    head_tokens: tuple[int, ...]  # of the parts in which the head computes
    sizes: dict[str, set[tuple[int, int]]]  # name: (inputs, outputs)

    def products(self, name: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """(direction, (rows, inner, columns)) of its three products."""
        for tokens in self.head_tokens if name == HEAD else (self.tokens,):
            for inputs, outputs in self.sizes[name]:
                yield "forward", (tokens, inputs, outputs)
                yield "dgrad", (tokens, outputs, inputs)
                yield "wgrad", (outputs, tokens, inputs)


def linears(config: TrainConfig) -> Linears:
    sizes: dict[str, set[tuple[int, int]]] = {}
    for name, inputs, outputs in matmul_shapes(config.model_config()):
        sizes.setdefault(NAMES.get(name, name), set()).add((inputs, outputs))
    tokens = config.micro_batch * config.block_size
    part = -(-tokens // config.logit_parts)  # as torch.chunk divides them
    of_head = {min(part, tokens - first) for first in range(0, tokens, part)}
    return Linears(tokens, tuple(of_head), sizes)


def matmul_of(place: Place, model: Linears) -> tuple[str, float]:
    """('qkv forward', its FLOPs). Where several Linears fit, all are named: 'qkv/up forward'; where none
    does, the shape: 'other matmul 8x16x32'."""
    found = factors(place.operator, place.shapes)
    if found is None:
        return "other matmul", 0.0
    rows, inner, columns = found
    flops = 2.0 * rows * inner * columns
    if place.operator in FUSED_OPERATORS:
        name, direction = FUSED_OPERATORS[place.operator]
        return f"{name} {'recompute' if place.phase == 'recompute' else direction}", flops
    in_head = HEAD_FUNCTION in place.path
    fits = [
        (name, direction)
        for name in model.sizes
        if in_head == (name == HEAD)
        for direction, shape in model.products(name)
        if shape == found and (in_head or allowed(direction, place))
    ]
    if not fits:
        return f"other matmul {rows}x{inner}x{columns}", flops
    directions = [direction for _, direction in fits]
    direction = "wgrad" if WEIGHT_GRADIENT in place.path and "wgrad" in directions else directions[0]
    names = dict.fromkeys(name for name, its in fits if its == direction)
    if place.phase == "recompute" and direction == "forward":
        direction = "recompute"
    return f"{'/'.join(names)} {direction}", flops


def is_product(name: str, place: Place) -> bool:
    """name: of the kernel. On a CPU it is the operator's own; there, operators within ours compute."""
    own = place.operator in OWN_OPERATORS or place.operator in FUSED_OPERATORS
    return place.operator in OPERATORS or (own and name != place.operator)


def allowed(direction: str, place: Place) -> bool:
    """Whether a product of this direction can be where this one is."""
    return (direction == "forward") == (place.phase != "backward")


def factors(operator: str, shapes: tuple[Shape, ...]) -> tuple[int, int, int] | None:
    """(rows, inner, columns) of a product of two matrices."""
    first, second = OPERATORS.get(operator, (0, 1))
    if len(shapes) <= second or len(shapes[first]) != 2 or len(shapes[second]) != 2:
        return None
    (rows, inner), (again, columns) = shapes[first], shapes[second]
    own = operator in OWN_OPERATORS or operator in FUSED_OPERATORS
    if own and inner == columns:  # transposed; of a square one, both give the same
        again, columns = columns, again
    return (rows, inner, columns) if inner == again else None
