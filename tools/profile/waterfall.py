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

from dataclasses import dataclass
from typing import Any

from mfu_versions import model_builder_v3 as v3
from tools.profile.parts import groups
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
    notes = []
    if peak_flops is None:
        notes.append("without a peak there is no MFU: milliseconds instead of points; state --peak_tflops")
        rows = [_row(name, ms[name]) for name in STEPS if ms.get(name)]
        return {"unit": "ms", "steps": rows, "notes": notes, "mfu_percent": None}
    ideal = 1000 * work.total / peak_flops
    ratio = peak_clock[0] / clock[0] if peak_clock[0] and clock[0] else None
    if ratio is None:
        reason = clock[1] or peak_clock[1]
        notes.append(f"there is no step for the clock: {reason}; its points are in the next step")
    matmul_ideal = (ratio or 1) * 1000 * work.matmul / peak_flops
    steps: dict[str, float | None] = {"clock": None if ratio is None else (ratio - 1) * ideal}
    if alone_ms is None:
        steps["matmuls"] = ms["matmuls"] - matmul_ideal
        notes.append("without bench.roofline the matmuls are one step, which begins at the peak")
    else:
        steps |= {"ceiling": alone_ms - matmul_ideal, "matmuls": ms["matmuls"] - alone_ms}
    steps["attention"] = ms["attention"] - (ratio or 1) * 1000 * work.attention / peak_flops
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
        "mfu_percent": 100 * ideal / (found["wall_ms"] - ms["profiler"]),
        "clock_mhz": clock[0],
        "peak_clock_mhz": peak_clock[0],
    }


def _row(name: str, ms: float | None) -> dict[str, Any]:
    """ms: None if it is not known, and then in the next step."""
    return {"step": name, "label": STEPS[name], "ms": ms, "points": None, "left_percent": None}
