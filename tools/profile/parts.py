"""Says which part of an iteration a piece of work is: a matmul of the model, attention, communication, or
what the code itself names.

A Linear with K inputs and N outputs is three products for M tokens: forward (M, K) x (K, N), dgrad (M, N) x
(N, K), wgrad (N, M) x (M, K). Their shapes and the phase tell which one a matmul is. Compiled code has no
ranges: there a kernel of torch.compile has the names of the operators that it was made of.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

import model_builder
from ops.ranges import BACKWARD, FORWARD
from training.configuration.keys import TrainConfig

# Operators that multiply two matrices; the factors are their first tensors, but addmm's second and third
PRODUCT = re.compile(
    r"aten::(mm|addmm_?|_scaled_mm|_scaled_mm_v2)|nanomfu::(\w+_matmul|add_float8_weight_gradient)"
)

RECOMPUTE = "recompute"  # the phase of a forward within the backward
COMPILED = ("CompiledFunction", "## Call CompiledFxGraph")
COLLECTIVE = re.compile(r"(?i)nccl|gloo|c10d|record_param_comms")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")
OF_ATTENTION = re.compile(r"(?i)attention|attn|^aten::bmm")  # bmm: only the manual one has it
FORWARD_OF_ATTENTION = re.compile(r"forward|fwd")
FUSED = re.compile(r"^triton_[a-z]+_fused_+(\w+?)(?:_\d+)?$")  # a kernel of torch.compile
NAME_WIDTH = 60  # characters of a kernel's name, or of those of its operators
# of a CPU's events: those that compute; others are ranges, Python functions and autograd
CALL = re.compile(r"(?!autograd|torch)\w+::")

# Groups of parts, each a step of the waterfall, but for the profiler
MATMUL, ATTENTION, RECOMPUTATION = "matmuls in the run", "attention", "recomputation"
MEMORY, COMMUNICATION = "memory-bound operations", "communication that nothing hides"
OF_IDLE, OF_PROFILER = "idle", "profiler"
GROUPS = (MATMUL, ATTENTION, RECOMPUTATION, MEMORY, COMMUNICATION, OF_IDLE, OF_PROFILER)


class Place(NamedTuple):
    """Where in the code a piece of work belongs."""

    name: str  # the innermost range or operator of ours; without one, the outermost call
    path: tuple[str, ...]  # ranges and operators, from the outside
    shapes: tuple[tuple[int, ...], ...]  # of the tensors that the innermost operator takes
    phase: str  # FORWARD, BACKWARD, RECOMPUTE or '': before and after them


class Part(NamedTuple):
    name: str
    step: str  # of GROUPS
    flops: float = 0.0  # in an iteration of one GPU; 0: not counted


PROFILER = Part("the profiler itself", OF_PROFILER)  # idle time that is not there without it
IDLE = Part("nothing running", OF_IDLE)  # on a CPU: Python and autograd between the operators
COMPILED_CODE = Part("compiled code", MEMORY)  # on a CPU, whose traces do not have its kernels


class Parts:
    """Those of a model and its micro-batch."""

    def __init__(self, config: TrainConfig):
        tokens = config.micro_batch * config.block_size
        chunk = -(-tokens // config.logit_parts)  # as torch.chunk divides them
        chunks = {min(chunk, tokens - first) for first in range(0, tokens, chunk)}
        modules = model_builder.build_model(config.model_config()).named_modules()
        linears = [(name.split(".")[-1], one) for name, one in modules if isinstance(one, torch.nn.Linear)]
        # {(phase, or 'head', whose gradients are made in the forward; the factors): names of products}
        self.names: defaultdict[tuple, list[str]] = defaultdict(list)
        self.flops: dict[str, float] = {}  # in an iteration
        counted = Counter((name, one.in_features, one.out_features) for name, one in linears)
        for (name, K, N), count in counted.items():
            head = "head" if name == "lm_head" else None
            for M in chunks if head else {tokens}:
                products = {"forward": ((M, K), (K, N)), "dgrad": ((M, N), (N, K)), "wgrad": ((N, M), (M, K))}
                for direction, shapes in products.items():
                    product = f"{head or name} {direction}"
                    phase = FORWARD if direction == "forward" else BACKWARD
                    self.names[head or phase, factors(shapes)].append(product)
                    self.flops[product] = 2.0 * config.micro_steps * count * tokens * K * N

    def of(self, name: str, place: Place | None, on_gpu: bool = True) -> Part:
        """The part of a kernel, or of an operator on a CPU. place: None if its name is all that is known."""
        names = (*reversed(place.path), place.name) if place else ()  # from the inside
        if COLLECTIVE.search(name):
            plain = [each.lower().replace("_", "") for each in (name, *names)]
            kinds = (kind for each in plain for kind in COLLECTIVES if kind.replace("-", "") in each)
            return Part(f"communication: {next(kinds, 'other')}", COMMUNICATION)
        if not on_gpu and name.startswith(COMPILED):
            return COMPILED_CODE
        if not on_gpu and not CALL.match(name):
            return IDLE
        if place and PRODUCT.fullmatch(place.path[-1]) and not name.startswith("Memset"):
            return self._product(place)
        if attention := next((each for each in (*names, name) if OF_ATTENTION.search(each)), None):
            phase = (place.phase if place else "") or FORWARD
            # compiled code has no ranges: the operator's name tells what its backward computes again
            if phase == BACKWARD and FORWARD_OF_ATTENTION.search(attention):
                phase = RECOMPUTE
            return Part(f"attention {phase}", RECOMPUTATION if phase == RECOMPUTE else ATTENTION)
        if fused := FUSED.match(name):
            return Part(f"compiled: {fused[1][:NAME_WIDTH]}", MEMORY)
        return Part(place.name if place else name[:NAME_WIDTH], MEMORY)

    def _product(self, place: Place) -> Part:
        """'qkv forward'. Where several products fit, all are named: 'qkv forward/up forward'; where none
        does, the shapes: 'other matmul 8x16 16x32'."""
        first = 1 if "addmm" in place.path[-1] else 0
        shapes = place.shapes[first : first + 2]
        phase = BACKWARD if place.phase == BACKWARD else FORWARD
        names = self.names.get(("head" if "LinearCrossEntropy" in place.path else phase, factors(shapes)))
        is_wgrad = any("weight_gradient" in name for name in place.path)  # a dgrad may have the same shapes
        names = [name for name in names or () if name.endswith("wgrad") == is_wgrad] or names
        if not names:
            return Part(" ".join(["other matmul", *("x".join(map(str, shape)) for shape in shapes)]), MATMUL)
        if place.phase == RECOMPUTE:
            return Part("/".join(names).replace(FORWARD, RECOMPUTE), RECOMPUTATION)
        return Part("/".join(names), MATMUL, sum(self.flops[name] for name in names))


def factors(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Equal for a matrix and its transpose, which some operators take."""
    return tuple(tuple(sorted(shape)) for shape in shapes)
