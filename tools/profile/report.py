"""Everything that a profile says, from what the runs have left: as content of profile.json, and as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.run_records import load_record, run_records
from common.text import aligned
from tools.profile.breakdown import breakdown, read_recording
from tools.profile.parts import Parts
from tools.profile.waterfall import clock_ratio, model_flops, waterfall
from training.configuration.keys import KEYS, TrainConfig

SMALLEST = 0.1  # percent of an iteration; smaller parts of a step are one line, and the JSON has all


def read_run(out_dir: Path) -> tuple[dict[str, Any], TrainConfig]:
    """(the record of the run in this folder, its config as it was resolved)."""
    record = load_record(run_records(out_dir)[-1])
    return record, TrainConfig(**{key: value for key, value in record["config"].items() if key in KEYS})


def analyze(
    out_dir: Path, plain: dict[str, Any], roofline: dict[str, Any] | None, roofline_reason: str | None
) -> dict[str, Any]:
    """The content of profile.json. out_dir: of the run with the profiler. plain: bench.throughput's result of
    the run without. roofline: bench.roofline's, or None and the reason. Raises RunError if rank 0 has left
    nothing that can be read."""
    record, config = read_run(out_dir)
    hardware = record["startup_info"]["hardware"]
    works, marks, over_host_clock, facts = read_recording(out_dir, Parts(config))
    medians = {key: plain[key] and plain[key]["median"] for key in ("time_ms", "mfu_percent", "sm_clock_mhz")}
    plain_ms = medians["time_ms"] if config.device == "cuda" else None  # a CPU's operators slow down, too
    found = breakdown(works, marks, over_host_clock, plain_ms)
    peak = hardware["peak"]["tflops_per_gpu"] and 1e12 * hardware["peak"]["tflops_per_gpu"]
    ratio = None
    if peak and config.peak_tflops is None:  # a stated peak belongs to no clock
        dense = peak / 2 if hardware["peak"]["sparse"] else peak
        ratio = clock_ratio(dense, facts, medians["sm_clock_mhz"])
    alone = 1000 * config.micro_steps * roofline["ceiling"]["matmul_seconds"] if roofline else None
    return {
        "device": hardware["gpu_name"],
        "processes": hardware["num_gpus"],
        "torch": record["startup_info"]["software"].get("torch"),
        "unprofiled": medians,
        "profiled": found,
        "waterfall": waterfall(model_flops(config), found, peak, ratio, alone),
        "roofline": roofline,
        "roofline_reason": roofline_reason,
        "config": record["config"],
    }


def lines(content: dict[str, Any]) -> list[str]:
    """For a reader."""
    found, plain, falls = content["profiled"], content["unprofiled"], content["waterfall"]
    wall, total, hidden = found["wall_ms"], found["sum_ms"], found["communication_hidden_ms"]
    shown = [row for row in found["parts"] if row["percent"] >= SMALLEST]
    smaller = {"part": "all smaller ones", "ms": total - sum(row["ms"] for row in shown)}
    parts, steps = [], []
    for row in [*shown, smaller, {"part": "sum", "ms": total}]:
        numbers = _number(row["ms"], ".3f"), _number(100 * row["ms"] / wall, ".2f")
        parts.append([row["part"], row.get("step", ""), *numbers, _number(row.get("tflops"), ".4g")])
    for row in falls["steps"]:
        steps.append([row["step"], *(_number(row[key], ".3f") for key in ("ms", "points", "left_percent"))])
    several = content["processes"] > 1
    of_ranks = f", {content['processes']} processes, rank 0" if several else ""
    verdict = "adds up" if found["adds_up"] else "DOES NOT ADD UP within 1 %"
    mfu = f"MFU {plain['mfu_percent']:.2f} %" if plain["mfu_percent"] else "no MFU"
    title = "From 100 % to the measured MFU: a step without figures is not known, and in the next one"
    return [
        f"{content['device']}{of_ranks}: an iteration, mean of {found['iterations']}, takes {wall:.3f} ms",
        "",
        *aligned(["part", "step", "ms", "%", "TFLOPS"], parts, ["part", "step"]),
        "",
        f"The table {verdict}: its sum is the wall clock of the trace, which differs from the host's clock "
        f"by {100 * (found['trace_over_host_clock'] - 1):+.2f} %.",
        *[f"Communication that other kernels hide, and that is not in the table: {hidden:.3f} ms."] * several,
        f"Without the profiler, in a run of its own: {plain['time_ms']:.3f} ms, {mfu}; with it "
        f"{100 * (wall / plain['time_ms'] - 1):+.1f} %.",
        "",
        title if falls["unit"] == "points" else "Milliseconds; state --peak_tflops for points of MFU",
        *aligned(["step", "ms", "points lost", "MFU %"], steps, ["step"]),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
