"""The way from 100 % to the measured MFU, in percentage points that add up exactly.

An iteration at 100 % MFU takes T0 = model FLOPs / peak. Each step adds milliseconds to it, until it is the
measured wall clock, and costs the points 100 T0 / (time before) - 100 T0 / (time after). A step can give
points back: fp8 matmuls are faster than the bf16 peak, and attention skips the causal half of the FLOPs that
the formula counts.

    T0                    all FLOPs at the datasheet's peak
    + clock               T0 (clock of the peak / clock that ran - 1)
    + matmuls alone       matmuls alone on this machine - their FLOPs at the peak of that clock
    + matmuls in the run  matmuls in the run - matmuls alone
    + attention           attention in the run - its FLOPs at the peak of that clock
    + recomputation, memory-bound operations, communication, idle: their time
    = wall clock, without what only the profiler takes
"""

from __future__ import annotations

from typing import Any

from mfu_versions import model_builder_v3 as v3
from tools.profile.parts import ATTENTION, GROUPS, MATMUL, OF_PROFILER
from training.configuration.keys import TrainConfig

# FLOPs of a multiprocessor in a clock cycle, dense bf16 with fp32 sums: they give the clock at which the
# datasheet's peak is reached (H100 SXM: 989.4e12 / 132 / 4096 = 1,830 MHz; NVML's highest clock is 1,980).
# Compute capabilities 8.9 and 12.0 are missing: there the rate depends on the product.
FLOPS_PER_CYCLE = {(8, 0): 2048, (8, 6): 1024, (9, 0): 4096, (10, 0): 8192, (10, 3): 8192}


def model_flops(config: TrainConfig) -> tuple[float, float]:
    """(matmuls, attention) of an iteration on a GPU, by formula v3: the scores in full, no recomputation."""
    counted = v3.count_flops(config.model_config(), config.block_size)["components"]
    attention = counted["attention_scores"] + counted["attention_context"]
    factor = v3.BACKWARD_FACTOR * config.micro_batch * config.micro_steps
    return factor * (sum(counted.values()) - attention), factor * attention


def clock_ratio(peak_flops: float, facts: dict[str, Any], sm_clock_mhz: float | None) -> float | None:
    """The clock at which the datasheet's peak is reached, as a multiple of that which ran; None if one is not
    known. facts: of the device, by training/records/profiler.py."""
    cycle = FLOPS_PER_CYCLE.get(tuple(facts.get("capability", ())))
    if cycle is None or not sm_clock_mhz:
        return None
    return peak_flops / (cycle * facts["multiprocessors"] * 1e6 * sm_clock_mhz)


def waterfall(
    flops: tuple[float, float],
    found: dict[str, Any],
    peak_flops: float | None,
    ratio: float | None,
    alone_ms: float | None,
) -> dict[str, Any]:
    """flops: model_flops()'s. found: breakdown()'s. ratio: clock_ratio()'s. alone_ms: the iteration's matmuls
    on this machine with nothing else, by bench.roofline. What is None is not known: its step has no figures,
    and its points are in the next one. Without a peak the steps are milliseconds."""
    ms = dict.fromkeys(GROUPS, 0.0)
    for row in found["parts"]:
        ms[row["step"]] += row["ms"]
    steps: dict[str, float | None] = {name: time for name, time in ms.items() if time and name != OF_PROFILER}
    ideal = 0.0
    if peak_flops:
        ideal = 1000 * sum(flops) / peak_flops
        matmul_ideal, attention_ideal = (1000 * (ratio or 1) * each / peak_flops for each in flops)
        steps = {
            "clock": None if ratio is None else (ratio - 1) * ideal,
            "matmuls alone": None if alone_ms is None else alone_ms - matmul_ideal,
            **steps,
            MATMUL: ms[MATMUL] - (matmul_ideal if alone_ms is None else alone_ms),
            ATTENTION: ms[ATTENTION] - attention_ideal,
        }
    rows: list[dict[str, Any]] = []
    before = ideal
    for name, added in steps.items():
        rows.append({"step": name, "ms": added, "points": None, "left_percent": None})
        if peak_flops and added is not None:
            left = 100 * ideal / (before + added)
            rows[-1] |= {"points": 100 * ideal / before - left, "left_percent": left}
            before += added
    percent = 100 * ideal / (found["wall_ms"] - ms[OF_PROFILER]) if peak_flops else None
    return {"unit": "points" if peak_flops else "ms", "steps": rows, "mfu_percent": percent}
