"""Sorts the memory of an iteration's fullest moment into parts, from a list of what was allocated and freed.

The rules are data. A tensor that lives as long as the run is known by its address. Any other is known by the
frames (file, line, function; innermost first) that were running when it was allocated: the first frame that a
rule knows decides. What no rule knows is "unknown", with the name of its innermost frame.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import model
from model_config import ModelConfig

Frame = tuple[str, int, str]  # file, line, function; an operator is ("", 0, its name)

WEIGHTS, WORKING, ADAM, GRADIENTS = "weights", "working weights", "Adam moments", "gradients"
FP8, LOSS, WORKSPACES, OTHER, UNKNOWN = (
    "quantized weights",
    "logits and loss",
    "workspaces",
    "other",
    "unknown",
)
ACTIVATIONS = "activations"
# activations by place; what is before the colon is the part
ATTENTION, FEED_FORWARD = f"{ACTIVATIONS}: attention", f"{ACTIVATIONS}: feed-forward"
STREAM, NORMS = f"{ACTIVATIONS}: residual stream", f"{ACTIVATIONS}: norms"
EMBEDDING, BACKWARD = f"{ACTIVATIONS}: embedding", f"{ACTIVATIONS}: their gradients"

PARTS = (WEIGHTS, WORKING, FP8, ADAM, GRADIENTS, ACTIVATIONS, LOSS, WORKSPACES, OTHER, UNKNOWN)

# items of training/records/memory_estimate.py, by how their names begin
ESTIMATED = {
    "weights (": WEIGHTS,
    "working weights": WORKING,
    "gathered weights": WORKING,
    "quantized weights": FP8,
    "Adam moments": ADAM,
    "gradient": GRADIENTS,  # sums, those being sent, FSDP's own part
    "whole gradients": GRADIENTS,
    "activations": ACTIVATIONS,
    "logits": LOSS,
    "head's": LOSS,
    "workspaces": WORKSPACES,
}


class Rule(NamedTuple):
    """A frame whose file contains `file` and whose function matches `function` from its beginning."""

    file: str
    function: str
    part: str


ANY_BACKWARD = r".*(backward|autograd)"
# In a frame, the first rule that fits decides. So what belongs to a backward comes before its file's others.
RULES = (
    Rule("ops/cross_entropy.py", "", LOSS),
    Rule("/ops/", ANY_BACKWARD, BACKWARD),
    Rule("ops/swiglu.py", "", FEED_FORWARD),
    Rule("ops/heads.py", "", ATTENTION),
    Rule("ops/norm.py", "", NORMS),
    Rule("ops/embedding.py", "", EMBEDDING),
    Rule("ops/documents.py", "", OTHER),
    Rule("training/hardware/attention_kernels.py", "", ATTENTION),
    Rule("training/strategies/", "publish", WORKING),
    Rule("training/strategies/", "", GRADIENTS),
    Rule("training/batches/", "", OTHER),
    Rule("training/optimization/optimizer.py", "", OTHER),
    Rule("training/optimization/update_guard.py", "", OTHER),
    Rule("ops/quantization/adamw_8bit.py", "", OTHER),
    Rule("torch/optim/", "", OTHER),
    # FSDP: gathered weights; then whole gradients, and the parts that they are reduced to
    Rule("torch/distributed/fsdp/", r".*(all_gather|alloc_storage|unshard\b|copy_out)", WORKING),
    Rule("torch/distributed/fsdp/", r".*(reduce|accumulate|post_backward)", GRADIENTS),
    # a compiled block; widths_of() says more
    Rule("torch/_functorch/", ANY_BACKWARD, BACKWARD),
    Rule("torch/_functorch/", r".*forward", STREAM),
    Rule("torch/autograd/", r".*backward", BACKWARD),  # on a CPU, the engine runs in this thread
)
# the same for code of model.py, whose functions are all called forward
CLASSES = (
    (model.Attention, ATTENTION),
    (model.manual_attention, ATTENTION),
    (model.FeedForward, FEED_FORWARD),
    (model.RMSNorm, NORMS),
    (model.LayerNorm, NORMS),
    (model.Block, STREAM),
    (model.Head, LOSS),
    (model.Transformer, EMBEDDING),
)
COMPILED = "torch/_inductor/"  # in the path of the file that calls compiled code


class Allocation(NamedTuple):
    """Memory that was taken, or given back if size is negative."""

    address: int
    size: int  # bytes
    frames: tuple[Frame, ...] | None = None  # None: it was there before the recording began


# --- what was there ---


def alive_at_peak(base: Iterable[Allocation], events: Iterable[Allocation]) -> list[Allocation]:
    """What was allocated at the moment at which the sum was largest. Memory that is given back without having
    been seen before does not count."""
    base, events = list(base), list(events)
    most, at = sum(block.size for block in base), 0
    for count, total in enumerate(_totals(base, events), start=1):
        if total > most:
            most, at = total, count
    alive = {block.address: block for block in base}
    for event in events[:at]:
        if event.size > 0:
            alive[event.address] = event
        else:
            alive.pop(event.address, None)
    return list(alive.values())


def _totals(base: list[Allocation], events: list[Allocation]) -> Iterator[int]:
    sizes = {block.address: block.size for block in base}
    total = sum(sizes.values())
    for event in events:
        if event.size > 0:
            total += event.size - sizes.get(event.address, 0)
            sizes[event.address] = event.size
        else:
            total -= sizes.pop(event.address, 0)
        yield total


# --- sorting ---


class Table(NamedTuple):
    """Bytes by part, and by place within a part; the rest by the names that no rule knows."""

    parts: dict[str, int]
    unknown: dict[str, int]


def sort_into_parts(
    alive: Iterable[Allocation], addresses: Mapping[int, str], widths: Mapping[int, str]
) -> Table:
    """`addresses`: where a tensor begins -> its part. `widths`: bytes -> place, for tensors of compiled
    blocks, whose code has no names."""
    starts = sorted(addresses)
    parts: defaultdict[str, int] = defaultdict(int)
    unknown: defaultdict[str, int] = defaultdict(int)
    for block in alive:
        at = bisect.bisect_left(starts, block.address)
        inside = at < len(starts) and starts[at] < block.address + block.size
        part = addresses[starts[at]] if inside else part_of(block, widths)
        parts[part] += block.size
        if part == UNKNOWN:
            unknown[_name(block)] += block.size
    return Table(dict(parts), dict(unknown))


def part_of(block: Allocation, widths: Mapping[int, str]) -> str:
    """The part of memory that was allocated during the recording, by its frames."""
    if block.frames is None:
        return UNKNOWN
    if not block.frames:  # no Python ran: autograd's own thread, in the backward of an operator of torch
        return BACKWARD
    for file, line, function in block.frames:
        in_model = f"/{file}".endswith("/model.py")  # torch.profiler's paths are relative to sys.path
        part = _part_in_model(line) if in_model else _part_by_rule(file, function)
        if part == STREAM and any(COMPILED in frame[0] for frame in block.frames):
            return widths.get(block.size, STREAM)
        if part is not None:
            return part
    return UNKNOWN


def _part_by_rule(file: str, function: str) -> str | None:
    for rule in RULES:
        if rule.file in f"/{file}" and re.match(rule.function, function):
            return rule.part
    return None


@functools.cache
def _part_in_model(line: int) -> str | None:
    for thing, part in CLASSES:
        source, first = inspect.getsourcelines(thing)
        if first <= line < first + len(source):
            return part
    return None


def _name(block: Allocation) -> str:
    if not block.frames:
        return "allocated before the recording"
    file, line, function = next((f for f in block.frames if f[0]), block.frames[0])
    return f"{function} ({'/'.join(file.split('/')[-2:])}:{line})" if file else function


def widths_of(config: ModelConfig, tokens: int, item_sizes: Iterable[int]) -> dict[int, str]:
    """Bytes of the tensors that a block makes -> place. Attention's output is often as wide as the stream,
    and then counts as that. Of several item sizes, the last decides."""
    A, v = config.attention_width, config.n_kv_head * config.head_dim  # v by itself: ops/heads.py copies it
    columns = [(A + 2 * v, ATTENTION), (A, ATTENTION), (v, ATTENTION)]
    columns += [(config.d_ff, FEED_FORWARD), (2 * config.d_ff, FEED_FORWARD), (config.n_embd, STREAM)]
    return {tokens * item * width: place for item in item_sizes for width, place in columns}


def estimated_parts(estimate: Mapping[str, float]) -> dict[str, float]:
    """The items of the estimate, by the same parts."""
    parts: defaultdict[str, float] = defaultdict(float)
    for item, size in estimate.items():
        part = next((part for begin, part in ESTIMATED.items() if item.startswith(begin)), UNKNOWN)
        parts[part] += size
    return dict(parts)
