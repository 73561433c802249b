"""Says which part of an iteration a piece of work is: a matmul of the model, attention, communication, or a
part that the code itself names (trace.Place.name).

A Linear with K inputs and N outputs is three products for M tokens: forward (M, K) x (K, N), dgrad (M, N) x
(N, K), wgrad (N, M) x (M, K). Their shapes tell which one a matmul is. Compiled code has no ranges: there a
kernel of torch.compile has the names of the operators that it was made of.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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

# Groups of parts: the steps of the waterfall, but for the profiler, which is in none.
MATMUL, OF_ATTENTION, RECOMPUTATION, MEMORY = "matmuls", "attention", "recomputation", "memory-bound"
COMMUNICATION, OF_IDLE, OF_PROFILER = "communication", "idle", "profiler"
GROUPS = (MATMUL, OF_ATTENTION, RECOMPUTATION, MEMORY, COMMUNICATION, OF_IDLE, OF_PROFILER)
PROFILER = "the profiler itself"  # idle time that the same iterations do not have without it
IDLE = "nothing running"  # on a CPU: Python and autograd between the operators
COMPILED_CODE = "compiled code"  # on a CPU, whose traces do not have its kernels


class Part(NamedTuple):
    name: str
    group: str  # of GROUPS
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
            return Part("other matmul", MATMUL)
        in_head = "LinearCrossEntropy" in place.path
        fits = [
            (name, direction)
            for name, direction, shape in self.products
            if shape == found and in_head == (name == HEAD)
            if in_head or (direction == FORWARD) == (place.phase != BACKWARD)
        ]
        flops = 2.0 * found[0] * found[1] * found[2]
        if not fits:
            return Part("other matmul {}x{}x{}".format(*found), MATMUL, flops)
        adds = any("weight_gradient" in name for name in place.path) and any(d == "wgrad" for _, d in fits)
        direction = "wgrad" if adds else fits[0][1]
        names = "/".join(dict.fromkeys(name for name, its in fits if its == direction))
        if place.phase == RECOMPUTE:
            return Part(f"{names} {RECOMPUTE}", RECOMPUTATION, flops)
        return Part(f"{names} {direction}", MATMUL, flops)


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
        return Part("communication: " + re.sub("^(all|reduce)_?(?=.)", r"\1-", kind), COMMUNICATION)
    if not work.device and name.startswith(COMPILED):
        return Part(COMPILED_CODE, MEMORY)
    if not work.device and not CALL.match(name):
        return Part(IDLE, OF_IDLE)
    # on a CPU, operators within ours compute
    products = (*PRODUCTS, *OWN_PRODUCTS) if work.device else tuple(PRODUCTS)
    if place and place.operator in products and not name.startswith("Memset"):
        return linears.part_of(place)
    if attention := next((each for each in (*names, name) if ATTENTION.search(each)), None):
        phase = (place.phase if place else "") or FORWARD
        # compiled code has no ranges: there its name tells what the backward computes again
        is_call = place and attention in place.path
        if is_call and phase == BACKWARD and ATTENTION_FORWARD.search(attention):
            phase = RECOMPUTE
        return Part(f"attention {phase}", RECOMPUTATION if phase == RECOMPUTE else OF_ATTENTION)
    if fused := FUSED.match(name):
        return Part(f"compiled: {fused[1][:NAME_WIDTH]}", MEMORY)
    return Part(place.name if place else name[:NAME_WIDTH], MEMORY)
