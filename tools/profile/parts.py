"""Sorts work into the parts of an iteration. The rules are the table RULES: the first that fits decides.

A rule looks at the names of the kernel and of the operators around it, at the phase, and at the shape of the
operator's first tensor. What no rule knows is the part UNKNOWN, which the output lists by name. A kernel that
torch.compile made of several operators has them in its name; it is counted once, under the names of all its
parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tools.profile.matmuls import DIRECTIONS, Linears, is_product, linears, matmul_of
from tools.profile.timeline import IDLE
from tools.profile.trace import Place, Shape, Work
from training.configuration.keys import TrainConfig

UNKNOWN = "unknown"
NORMS, ACTIVATION, ROTARY, HEAD_NORM = "norms and residual sums", "activation", "rotary", "QK-norm"
LOSS, EMBEDDING, OPTIMIZER, CASTS = "loss", "embedding", "optimizer", "casts"
GRADIENT_SUMS, COPIES, ZEROS, DROPOUT = "gradient sums", "copies", "zeros", "dropout"
LOST_MATMUL = "matmul, place unknown"
COMMUNICATION = "communication: "
ATTENTION = {phase: f"attention {phase}" for phase in ("forward", "backward", "recompute")}
COMPILED = "compiled operators without names"
WAITING = "waiting for another rank"
PROFILER = "the profiler itself"  # idle time that the same iterations do not have without it
HOST = "no operator running"  # on a CPU: Python and autograd between the operators


class Rule(NamedTuple):
    """What is stated must fit: patterns are searched for."""

    part: str
    name: str = ""  # of the kernel
    operator: str = ""  # the innermost
    path: str = ""  # operators from the outside
    phase: str = ""
    shape: str = ""  # the last dimensions of the first tensor, as numbers or names of DIMENSIONS


DIMENSIONS = {
    "C": "the model's width",
    "F": "the feed-forward width",
    "2F": "gate and up beside each other",
    "D": "the width of a head",
    "D/2": "half of it: rotary angles",
    "HD": "all query heads",
    "QKV": "all query, key and value heads",
}
ATTENTION_NAMES = (
    r"scaled_dot_product|_cudnn_attention|flash_attn|flash_attention|FlashAttn|fmha|flex_attention"
)

VIEWS = (
    r"^aten::(as_strided|view|_?reshape\w*|_unsafe_view|expand|select|slice|t|transpose|permute|unsqueeze|squeeze"
    r"|split\w*|chunk|narrow|detach|flatten|unflatten|unbind|alias|matmul|linear|empty\w*|result_type|resize_)$"
)

RULES = (
    # communication: NCCL's kernels; on a CPU the operators that start it
    Rule(COMMUNICATION + "all-gather", name=r"(?i)^(nccl|gloo|c10d).*all_?gather"),
    Rule(COMMUNICATION + "reduce-scatter", name=r"(?i)^(nccl|gloo|c10d).*reduce_?scatter"),
    Rule(COMMUNICATION + "all-reduce", name=r"(?i)^(nccl|gloo|c10d).*all_?reduce"),
    Rule(COMMUNICATION + "broadcast", name=r"(?i)^(nccl|gloo|c10d).*broadcast"),
    Rule(COMMUNICATION + "other", name=r"(?i)^(nccl|gloo|c10d|record_param_comms)"),
    # small helpers of any operator
    Rule(ZEROS, name=r"^(?i:memset)"),
    Rule(ZEROS, operator=r"^aten::(zero_|zeros|zeros_like|fill_|_foreach_zero_|full|ones|ones_like)$"),
    # what our own operators do, with everything that they launch
    Rule(EMBEDDING, path=r"EmbeddingFunction|EmbeddingBackward|aten::embedding"),
    Rule("QK-norm and rotary", path=r"nanomfu::heads"),
    Rule(NORMS, path=r"nanomfu::add_norm|layer_norm|LayerNorm|rms_norm|RsqrtBackward|MeanBackward"),
    Rule(ACTIVATION, path=r"nanomfu::(swiglu|activat)"),
    Rule(CASTS, path=r"nanomfu::(float8_cast|amax|delayed_quantize|block_operand|emulate)"),
    Rule(CASTS, path=r"nanomfu::add_weight_gradient > aten::(to|contiguous|clone)"),
    Rule(GRADIENT_SUMS, path=r"weight_gradient|AccumulateGrad|FSDP::post_backward_accumulate"),
    Rule(GRADIENT_SUMS, operator=r"^aten::(add_|addcmul_)$", path=r"LinearCrossEntropy"),
    # attention; torch.bmm is the manual one's
    Rule("attention", path=ATTENTION_NAMES),
    Rule("attention", name=r"fmha|flash_(fwd|bwd)|native_sdpa|cudnn::fusion|fused_flex"),
    Rule(
        "attention", path=r"aten::(bmm|baddbmm|softmax|_softmax|masked_fill)|(Softmax|MaskedFill|Bmm)Backward"
    ),
    # the update
    Rule(CASTS, name=r"CopyFunctor<c10::BFloat16, float|^_quantize|^_amax"),
    Rule(CASTS, operator=r"^aten::(_foreach_copy_|abs|amax|reciprocal|copy_)$", phase="update"),
    Rule(
        CASTS,
        operator=r"^aten::(abs|amax|reciprocal|clamp|div)$",
        path="LinearCrossEntropy >",
        phase="forward",
    ),
    Rule(OPTIMIZER, path=r"Optimizer\.step"),
    # loss and head
    Rule(CASTS, path=r"FSDP::post_backward_reshard.* > aten::to"),
    Rule(LOSS, path=r"LinearCrossEntropy|nanomfu::cross_entropy|nll_loss|log_softmax"),
    # elementwise operators of an eager model
    Rule(DROPOUT, path=r"dropout|bernoulli"),
    Rule(ACTIVATION, path=r"(?i)gelu|silu"),
    Rule("copies for communication", path=r"FSDP::|c10d::|fsdp::"),
    Rule(OPTIMIZER, phase="update"),
    Rule(COPIES, name=r"^(?i:memcpy)|CatArray"),
    Rule(COPIES, operator=r"^aten::(cat|clone|contiguous|stack|index_select)$|^fsdp::"),
    Rule(CASTS, path=r"aten::(to|_to_copy|copy_)( |$)"),
    Rule(EMBEDDING, operator=r"^aten::(sum|add)$", path=r"AddBackward0 > aten::sum$"),
    Rule(ROTARY, shape="D/2"),
    Rule(ACTIVATION, shape="F"),
    Rule(ACTIVATION, shape="2F"),
    Rule(HEAD_NORM, shape="D"),
    Rule(NORMS, shape="C"),
    # with nothing but the kernel's name
    Rule(OPTIMIZER, name=r"FusedAdam|^_adamw$|LpNorm|lpnorm|NormTwoOps"),
    Rule(GRADIENT_SUMS, name=r"^_add_embedding_gradient"),
    Rule(NORMS, name=r"^_add_norm|layer_norm"),
    Rule(ACTIVATION, name=r"^_swiglu|Gelu|Silu"),
    Rule("QK-norm and rotary", name=r"^_heads_"),
    Rule(LOSS, name=r"^_cross_entropy"),
    Rule(ZEROS, name=r"FillFunctor|ZeroFunctor"),
    Rule(LOST_MATMUL, name=r"^nvjet|gemm|cutlass|xmma|cublas|splitK"),
    # on a CPU: operators that compute nothing, and the time between those that do
    Rule(HOST, operator=VIEWS),
    Rule(COMPILED, operator=r"^## Call CompiledFxGraph|^CompiledFunction"),
    Rule(HOST, operator=r"^autograd::|^torch::autograd|Backward\d*$|^Torch-Compiled|Function$|^Linear|^$"),
)

# {a word in the name of a kernel of torch.compile: its part}
FUSED = {
    r"layer_norm|rms_norm|rsqrt": NORMS,
    r"gelu|silu|sigmoid|exp2": ACTIVATION,
    r"amax|float8": CASTS,
    r"embedding": EMBEDDING,
    r"softmax|nll|logsumexp": LOSS,
    r"dropout|bernoulli|random": DROPOUT,
}
# for kernels in which none of these words is
FUSED_REST = {
    r"cat|clone|transpose|permute|slice|select": COPIES,
    r"add|sum": NORMS,
    r"_to_copy": CASTS,
}
FUSED_NAME = re.compile(r"^(?:triton|cpp)_\w*?fused_(\w+)")


class Classified(NamedTuple):
    part: str
    flops: float  # of the call; 0 if it is no matmul, or its shape is not known


class Classifier:
    """Knows the model. It remembers what it has seen: a trace has few different kernels."""

    def __init__(self, config: TrainConfig):
        model = config.model_config()
        self.linears: Linears = linears(config)
        D = model.head_dim
        self.dimensions: Mapping[str, int] = {
            "C": model.n_embd,
            "F": model.d_ff,
            "2F": 2 * model.d_ff,
            "D": D,
            "D/2": D // 2,
            "HD": model.n_head * D,
            "QKV": (model.n_head + 2 * model.n_kv_head) * D,
        }
        self.heads_part = "QK-norm and rotary" if model.qk_norm else ROTARY
        self.seen: dict[tuple, Classified] = {}

    def __call__(self, work: Work) -> Classified:
        place = work.place
        key = (work.name, place and (place.operator, place.path, place.shapes, place.phase))
        if key not in self.seen:
            self.seen[key] = self._classify(work.name, place)
        return self.seen[key]

    def _classify(self, name: str, place: Place | None) -> Classified:
        if place and is_product(name, place) and not name.startswith("Memset"):
            return Classified(*matmul_of(place, self.linears))
        fused = FUSED_NAME.match(name)
        if fused and (part := _fused_part(fused[1])) != UNKNOWN:
            return Classified(part, 0.0)
        for rule in RULES:
            if self._fits(rule, name, place):
                return Classified(self._named(rule.part, place), 0.0)
        return Classified(UNKNOWN, 0.0)

    def _fits(self, rule: Rule, name: str, place: Place | None) -> bool:
        if rule.name and not re.search(rule.name, name):
            return False
        if place is None:
            return not (rule.operator or rule.path or rule.phase or rule.shape)
        return (
            (not rule.operator or re.search(rule.operator, place.operator) is not None)
            and (not rule.path or re.search(rule.path, place.path) is not None)
            and (not rule.phase or rule.phase == place.phase)
            and (not rule.shape or self._has_shape(rule.shape, place.shapes))
        )

    def _has_shape(self, shape: str, shapes: tuple[Shape, ...]) -> bool:
        """Compares the last dimension. A single number is no activation."""
        return bool(shapes) and len(shapes[0]) > 1 and shapes[0][-1] == self.dimensions[shape]

    def _named(self, part: str, place: Place | None) -> str:
        if part == "attention":
            phase = place.phase if place else "forward"
            return ATTENTION.get(phase, ATTENTION["forward"])
        return self.heads_part if part == "QK-norm and rotary" else part


def _fused_part(operators: str) -> str:
    """'norms and residual sums, casts' of 'abs_amax_native_layer_norm'."""
    for table in (FUSED, FUSED_REST):
        found = [part for words, part in table.items() if re.search(f"(?:^|_)(?:{words})(?:_|$)", operators)]
        if found:
            return ", ".join(found if table is FUSED else found[:1])
    return UNKNOWN


def is_matmul(part: str) -> bool:
    return "matmul" in part or not is_attention(part) and part.rpartition(" ")[2] in DIRECTIONS


def is_attention(part: str) -> bool:
    return part.startswith("attention ")


def is_communication(part: str) -> bool:
    return part.startswith(COMMUNICATION)


def is_recomputed(part: str) -> bool:
    return part.endswith(" recompute")


# --- groups of parts: the steps of the waterfall ---

GROUPS = (
    *("matmuls", "attention", "recomputation", "memory-bound"),
    *("communication", "ranks", "idle", "profiler"),
)


def group_of(part: str) -> str:
    """The step of the waterfall to which a part of the table belongs."""
    if part == WAITING:
        return "ranks"
    if part == PROFILER:
        return "profiler"
    if part in IDLE or part == HOST:
        return "idle"
    if is_communication(part):
        return "communication"
    if is_recomputed(part):
        return "recomputation"
    if is_attention(part):
        return "attention"
    return "matmuls" if is_matmul(part) else "memory-bound"


def groups(parts: list[dict[str, Any]]) -> dict[str, float]:
    """{group: milliseconds} of the table."""
    found = dict.fromkeys(GROUPS, 0.0)
    for row in parts:
        found[group_of(row["part"])] += row["ms"]
    return found
