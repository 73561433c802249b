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
    + recomputation, memory-bound operations, communication, idle: their time
    = wall clock, without what only the profiler takes
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mfu_versions import model_builder_v3 as v3
from tools.profile.parts import OF_PROFILER
from training.configuration.keys import TrainConfig

# FLOPs of a multiprocessor in a clock cycle, dense bf16 with fp32 sums: they give the clock at which the
# datasheet's peak is reached (H100 SXM: 989.4e12 / 132 / 4096 = 1,830 MHz; NVML's highest clock is 1,980).
# Compute capabilities 8.9 and 12.0 are missing: there the rate depends on the product.
FLOPS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}

STEPS = {  # {step: its label}; docs/profile.md says what could be done about each
    "clock": "clock below that of the peak",
    "ceiling": "matmuls alone, below the peak",
    "matmuls": "matmuls in the run",
    "attention": "attention",
    "recomputation": "recomputation",
    "memory-bound": "memory-bound operations",
    "communication": "communication that nothing hides",
    "idle": "idle: no kernel running",
}
ALL_LOST = tuple(STEPS)[4:]  # steps of which the whole time is lost


class ModelFlops(NamedTuple):
    """Per iteration and GPU."""

    matmul: float
    attention: float


def model_flops(config: TrainConfig) -> ModelFlops:
    """By formula v3: the scores in full, no recomputation."""
    counted = v3.count_flops(config.model_config(), config.block_size)["components"]
    attention = counted["attention_scores"] + counted["attention_context"]
    factor = v3.BACKWARD_FACTOR * config.micro_batch * config.micro_steps
    return ModelFlops(factor * (sum(counted.values()) - attention), factor * attention)


def clock_ratio(peak_flops: float, facts: dict[str, Any], row: dict[str, Any]) -> tuple[float | None, str]:
    """(the clock at which the datasheet's peak is reached as a multiple of that which ran, ''), or (None, why
    it is not known). facts: of the device, by the profiler; row: of the run's log."""
    cycle = FLOPS_PER_CYCLE.get(tuple(facts.get("capability", ())))
    if cycle is None:
        return None, "it is not known at which clock this device reaches its peak"
    if not row.get("sm_clock_mhz"):
        return None, row.get("gpu_reason") or "no log row has the clock of the GPU"
    return peak_flops / (cycle * facts["multiprocessors"] * 1e6 * row["sm_clock_mhz"]), ""


def waterfall(
    flops: ModelFlops,
    found: dict[str, Any],
    peak_flops: float | None,
    ratio: float | None,
    reason: str,
    alone_ms: float | None,
) -> dict[str, Any]:
    """`found` is breakdown()'s. ratio and reason are clock_ratio()'s. `alone_ms`: the iteration's matmuls on
    this machine with nothing else, by bench.roofline; None: not measured."""
    ms = dict.fromkeys((*STEPS, OF_PROFILER), 0.0)
    for row in found["parts"]:
        ms[row["group"]] += row["ms"]
    notes = []
    if peak_flops is None:
        notes.append("without a peak there is no MFU: milliseconds instead of points; state --peak_tflops")
        rows = [_row(name, ms[name]) for name in STEPS if ms[name]]
        return {"unit": "ms", "steps": rows, "notes": notes, "mfu_percent": None}
    ideal = 1000 * sum(flops) / peak_flops
    if ratio is None:
        notes.append(f"there is no step for the clock: {reason}; its points are in the next step")
    matmul_ideal, attention_ideal = (1000 * (ratio or 1) * each / peak_flops for each in flops)
    steps: dict[str, float | None] = {"clock": None if ratio is None else (ratio - 1) * ideal}
    if alone_ms is None:
        steps["matmuls"] = ms["matmuls"] - matmul_ideal
        notes.append("without bench.roofline the matmuls are one step, which begins at the peak")
    else:
        steps |= {"ceiling": alone_ms - matmul_ideal, "matmuls": ms["matmuls"] - alone_ms}
    steps["attention"] = ms["attention"] - attention_ideal
    steps |= {name: ms[name] for name in ALL_LOST if ms[name]}
    rows, before = [], ideal
    for name, added in steps.items():
        rows.append(_row(name, added))
        if added is not None:
            after = before + added
            points = 100 * ideal / before - 100 * ideal / after
            rows[-1] |= {"points": points, "left_percent": 100 * ideal / after}
            before = after
    if any((row["points"] or 0) < 0 for row in rows[1:]):
        notes.append(
            "a step that gives points back is faster than the formula's FLOPs at the bf16 peak: fp8 matmuls, "
            "or attention, whose kernels skip the causal half that the formula counts"
        )
    return {
        "unit": "points",
        "steps": rows,
        "notes": notes,
        "mfu_percent": 100 * ideal / (found["wall_ms"] - ms[OF_PROFILER]),
    }


def _row(name: str, ms: float | None) -> dict[str, Any]:
    """ms: None if it is not known, and then in the next step."""
    return {"step": name, "label": STEPS[name], "ms": ms, "points": None, "left_percent": None}
