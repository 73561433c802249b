"""The way from 100 % to the measured MFU, in percentage points that add up exactly.

An iteration at 100 % MFU takes T0 = model FLOPs / peak. Each step adds milliseconds to it, until it is the
measured wall clock, and costs the points 100 T0 / (time before) - 100 T0 / (time after). A step can give
points back: fp8 matmuls are faster than the bf16 peak, and attention skips the causal half of the FLOPs that
the formula counts.

    T0                                      all FLOPs at the datasheet's peak
    + clock      T0 (clock of the peak / clock that ran - 1)
    + ceiling    matmuls alone on this machine - their FLOPs at the peak of that clock
    + matmuls    matmuls in the run - matmuls alone
    + attention  attention in the run - its FLOPs at the peak of that clock
    + recomputation, memory-bound operations, communication, waiting for ranks, idle: their time
    = wall clock, without what only the profiler takes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from mfu_versions import model_builder_v3 as v3
from tools.profile.parts import groups
from training.configuration.keys import TrainConfig

# FLOPs of a multiprocessor in a clock cycle, dense bf16 with fp32 sums: they give the clock at which the
# datasheet's peak is reached (H100 SXM: 989.4e12 / 132 / 4096 = 1,830 MHz; NVML's highest clock is 1,980).
# Compute capabilities 8.9 and 12.0 are missing: there the rate depends on the product.
FLOPS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}

ADVICE = {
    "clock": "a GPU at its power limit lowers its clock: raise the limit, cool it, or save power (fp8)",
    "ceiling": "larger or better shaped matmuls: a larger batch_size, widths that are multiples of 256",
    "matmuls": "other kernels share power, bandwidth and cache: hide less beside them, or see their clock",
    "attention": "another attention_backend, shorter sequences, or doc_masking, which skips other documents",
    "recomputation": "activation_checkpointing='memory_bound' or 'none', if the memory allows it",
    "memory-bound": "compile=True fuses them, more micro-steps share an update; begin with the largest",
    "communication": "more micro-steps per update; reduce_dtype='bfloat16'; compare DDP, ZeRO-1 and FSDP",
    "ranks": "a rank is slower: look for the one that waits least (clock, data, other processes)",
    "idle": "use_cuda_graphs=True or a larger batch_size against launches, use_dataloader=True against data",
}


class Step(NamedTuple):
    name: str
    label: str
    ms: float | None  # None: not known, and then in the next step


@dataclass(frozen=True)
class Work:
    """What the model's FLOPs are, per iteration and GPU."""

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention


def model_work(config: TrainConfig) -> Work:
    """By formula v3: the scores in full, no recomputation."""
    counted = v3.count_flops(config.model_config(), config.block_size)["components"]
    sequences = config.micro_batch * config.micro_steps
    attention = counted["attention_scores"] + counted["attention_context"]
    factor = v3.BACKWARD_FACTOR * sequences
    return Work(factor * (sum(counted.values()) - attention), factor * attention)


def peak_clock_mhz(peak_flops: float, facts: dict[str, Any]) -> tuple[float | None, str | None]:
    """(the clock at which the datasheet's peak is reached, None), or (None, why it is not known)."""
    capability = tuple(facts.get("capability", ()))
    if capability not in FLOPS_PER_CYCLE:
        return None, "it is not known at which clock this device reaches its peak"
    cycle = facts["multiprocessors"] * FLOPS_PER_CYCLE[capability]
    return peak_flops / cycle / 1e6, None


def waterfall(
    work: Work,
    found: dict[str, Any],
    peak_flops: float | None,
    clock: tuple[float | None, str | None],
    peak_clock: tuple[float | None, str | None],
    alone_ms: float | None,
) -> dict[str, Any]:
    """`found` is breakdown()'s. clock and peak_clock are (MHz, None) or (None, why not). `alone_ms`: the
    iteration's matmuls on this machine with nothing else, by bench.roofline; None: not measured."""
    ms = groups(found["parts"])
    wall = found["wall_ms"] - ms["profiler"]
    notes = []
    if peak_flops is None:
        steps = [Step(name, label, ms[name]) for name, label in LABELS.items() if ms.get(name)]
        notes.append("without a peak there is no MFU: milliseconds instead of points; state --peak_tflops")
        return {"unit": "ms", "steps": _in_ms(steps), "notes": notes, "mfu_percent": None}
    ideal = 1000 * work.total / peak_flops
    ratio = peak_clock[0] / clock[0] if peak_clock[0] and clock[0] else None
    if ratio is None:
        reason = clock[1] or peak_clock[1]
        notes.append(f"there is no step for the clock: {reason}; its points are in the next step")
    matmul_ideal = (ratio or 1) * 1000 * work.matmul / peak_flops
    attention_ideal = (ratio or 1) * 1000 * work.attention / peak_flops
    steps = [Step("clock", LABELS["clock"], None if ratio is None else (ratio - 1) * ideal)]
    if alone_ms is None:
        steps.append(Step("ceiling", "matmuls below the peak", ms["matmuls"] - matmul_ideal))
        notes.append("without bench.roofline the matmuls are one step")
    else:
        steps.append(Step("ceiling", LABELS["ceiling"], alone_ms - matmul_ideal))
        steps.append(Step("matmuls", LABELS["matmuls"], ms["matmuls"] - alone_ms))
    steps.append(Step("attention", LABELS["attention"], ms["attention"] - attention_ideal))
    steps += [Step(name, LABELS[name], ms[name]) for name in PLAIN if ms[name]]
    if any((step.ms or 0) < 0 for step in steps[1:]):
        notes.append(
            "a step that gives points back is faster than the formula's FLOPs at the bf16 peak: fp8 matmuls, "
            "or attention, whose kernels skip the causal half that the formula counts"
        )
    return {
        "unit": "points",
        "steps": _in_points(steps, ideal),
        "notes": notes,
        "mfu_percent": 100 * ideal / wall,
        "clock_mhz": clock[0],
        "peak_clock_mhz": peak_clock[0],
    }


LABELS = {
    "clock": "clock below that of the peak",
    "ceiling": "matmuls alone, below the peak",
    "matmuls": "matmuls in the run, slower than alone",
    "attention": "attention",
    "recomputation": "recomputation",
    "memory-bound": "memory-bound operations",
    "communication": "communication that nothing hides",
    "ranks": "waiting for another rank",
    "idle": "idle: no kernel running",
}
PLAIN = ("recomputation", "memory-bound", "communication", "ranks", "idle")  # their time is all lost


def _in_points(steps: list[Step], ideal: float) -> list[dict[str, Any]]:
    rows, before = [], ideal
    for name, label, ms in steps:
        after = before + (ms or 0)
        points = None if ms is None else 100 * ideal / before - 100 * ideal / after
        rows.append(
            {
                "step": name,
                "label": label,
                "ms": ms,
                "points": points,
                "left_percent": None if ms is None else 100 * ideal / after,
                "advice": ADVICE[name],
            }
        )
        before = after
    return rows


def _in_ms(steps: list[Step]) -> list[dict[str, Any]]:
    labels = {"matmuls": "matmuls"}
    return [
        {
            "step": name,
            "label": labels.get(name, label),
            "ms": ms,
            "points": None,
            "left_percent": None,
            "advice": ADVICE[name],
        }
        for name, label, ms in steps
    ]
