"""Says which part of an iteration a piece of work is: a matmul of the model, attention, communication, or a
part that the code itself names (trace.Place.name).

A Linear with K inputs and N outputs is three products for M tokens: forward (M, K) x (K, N), dgrad (M, N) x
(N, K), wgrad (N, M) x (M, K). Their shapes tell which one a matmul is. Compiled code has no ranges: there a
kernel of torch.compile has the names of the operators that it was made of.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from bench.roofline import matmul_shapes
from ops.ranges import BACKWARD, FORWARD
from tools.profile.trace import COMPILED, RECOMPUTE, Place, Work
from training.configuration.keys import TrainConfig

# {operator: which of its tensors are the two factors}. Those of ours are one matmul each, of the first tensor
# and the second or its transpose: by cuBLASLt, and by QuACK.
PRODUCTS = {
    **dict.fromkeys(("aten::mm", "aten::_scaled_mm", "aten::_scaled_mm_v2"), (0, 1)),
    **dict.fromkeys(("aten::addmm", "aten::addmm_"), (1, 2)),
}
OWN_PRODUCTS = (
    "nanomfu::add_float8_weight_gradient",
    "nanomfu::activated_matmul",
    "nanomfu::activation_backward_matmul",
)
HEAD = "head"
MATMULS = ("forward", "dgrad", "wgrad")

COLLECTIVE = re.compile(r"(?i)nccl|gloo|c10d|record_param_comms")
KIND = re.compile(r"(?i)(all_?gather|reduce_?scatter|all_?reduce|broadcast)")
ATTENTION = re.compile(r"(?i)attention|attn|^aten::bmm")  # bmm: only the manual one has it
ATTENTION_FORWARD = re.compile(r"forward|fwd|attention$")
FUSED = re.compile(r"^triton_[a-z]+_fused_+(\w+?)(?:_\d+)?$")  # a kernel of torch.compile
NAME_WIDTH = 60  # characters of a kernel's name, or of those of its operators
# of a CPU's events: those that compute; others are ranges, Python functions and autograd
CALL = re.compile(r"(?!autograd|torch)\w+::")

COMMUNICATION, ATTENTION_PART = "communication: ", "attention "
PROFILER = "the profiler itself"  # idle time that the same iterations do not have without it
IDLE = "nothing running"  # on a CPU: Python and autograd between the operators
COMPILED_CODE = "compiled code"  # on a CPU, whose traces do not have its kernels


class Part(NamedTuple):
    name: str
    flops: float = 0.0  # of the call, of a matmul


class Linears:
    """Every Linear of the model, and the tokens of a micro-step."""

    def __init__(self, config: TrainConfig):
        tokens = config.micro_batch * config.block_size
        part = -(-tokens // config.logit_parts)  # as torch.chunk divides them
        of_head = {min(part, tokens - first) for first in range(0, tokens, part)}
        self.products: list[tuple[str, str, tuple[int, int, int]]] = []
        for name, inputs, outputs in matmul_shapes(config.model_config()):
            name, rows = (HEAD, of_head) if name == "lm_head" else (name, {tokens})
            for M in rows:
                shapes = (M, inputs, outputs), (M, outputs, inputs), (outputs, M, inputs)
                self.products += [(name, *each) for each in zip(MATMULS, shapes, strict=True)]

    def part_of(self, place: Place) -> Part:
        """'qkv forward'. Where several Linears fit, all are named: 'qkv/up forward'; where none does, the
        shape: 'other matmul 8x16x32'. The head, which makes its gradients in the forward, has a range of its
        own; elsewhere the phase tells products of equal shape apart, as GPT-2's up forward and down dgrad."""
        found = factors(place)
        if found is None:
            return Part("other matmul")
        in_head = "LinearCrossEntropy" in place.path
        fits = [
            (name, direction)
            for name, direction, shape in self.products
            if shape == found and in_head == (name == HEAD)
            if in_head or (direction == FORWARD) == (place.phase != BACKWARD)
        ]
        flops = 2.0 * found[0] * found[1] * found[2]
        if not fits:
            return Part("other matmul {}x{}x{}".format(*found), flops)
        adds = any("weight_gradient" in name for name in place.path) and any(d == "wgrad" for _, d in fits)
        direction = "wgrad" if adds else fits[0][1]
        names = "/".join(dict.fromkeys(name for name, its in fits if its == direction))
        return Part(f"{names} {RECOMPUTE if place.phase == RECOMPUTE else direction}", flops)


def factors(place: Place) -> tuple[int, int, int] | None:
    """(rows, inner, columns) of a product of two matrices."""
    first, second = PRODUCTS.get(place.operator, (0, 1))
    shapes = place.shapes
    if len(shapes) <= second or len(shapes[first]) != 2 or len(shapes[second]) != 2:
        return None
    (rows, inner), (again, columns) = shapes[first], shapes[second]
    if place.operator in OWN_PRODUCTS and inner == columns:  # transposed; of a square one, both give the same
        again, columns = columns, again
    return (rows, inner, columns) if inner == again else None


def part_of(work: Work, linears: Linears) -> Part:
    name, place = work.name, work.place
    names = (*reversed(place.path), place.name) if place else ()  # from the inside
    if COLLECTIVE.search(name):
        kind = next((found[1].lower() for each in (name, *names) if (found := KIND.search(each))), "other")
        return Part(COMMUNICATION + re.sub("^(all|reduce)_?(?=.)", r"\1-", kind))
    if not work.device and name.startswith(COMPILED):
        return Part(COMPILED_CODE)
    if not work.device and not CALL.match(name):
        return Part(IDLE)
    # on a CPU, operators within ours compute
    products = (*PRODUCTS, *OWN_PRODUCTS) if work.device else tuple(PRODUCTS)
    if place and place.operator in products and not name.startswith("Memset"):
        return linears.part_of(place)
    if attention := next((each for each in (*names, name) if ATTENTION.search(each)), None):
        phase = (place.phase if place else "") or FORWARD
        # compiled code has no ranges: there its name tells what the backward computes again
        is_call = place and attention in place.path
        again = is_call and phase == BACKWARD and ATTENTION_FORWARD.search(attention)
        return Part(f"{ATTENTION_PART}{RECOMPUTE if again else phase}")
    if fused := FUSED.match(name):
        return Part(f"compiled: {fused[1][:NAME_WIDTH]}")
    return Part(place.name if place else name[:NAME_WIDTH])


def is_matmul(part: str) -> bool:
    return part.startswith("other matmul") or part.endswith(tuple(f" {d}" for d in MATMULS))


# --- groups of parts: the steps of the waterfall ---

GROUPS = ("matmuls", "attention", "recomputation", "memory-bound", "communication", "idle", "profiler")
OF_ONE_PART = {PROFILER: "profiler", IDLE: "idle"}


def group_of(part: str) -> str:
    """The step of the waterfall to which a part of the table belongs."""
    if part in OF_ONE_PART:
        return OF_ONE_PART[part]
    if part.startswith(COMMUNICATION):
        return "communication"
    if part.endswith(f" {RECOMPUTE}"):
        return "recomputation"
    if part.startswith(ATTENTION_PART):
        return "attention"
    return "matmuls" if is_matmul(part) else "memory-bound"


def groups(parts: list[dict[str, Any]]) -> dict[str, float]:
    """{group: milliseconds} of the table."""
    found = dict.fromkeys(GROUPS, 0.0)
    for row in parts:
        found[group_of(row["part"])] += row["ms"]
    return found
