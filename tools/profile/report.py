"""Computes everything that a profile says from the folder that a run has left, and writes it for a reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.json_file import read_json
from common.run_records import run_records
from common.text import aligned
from tools.profile.breakdown import adds_up, breakdown, read_rank
from tools.profile.parts import COMMUNICATION, Linears
from tools.profile.waterfall import clock_ratio, model_flops, waterfall
from training.configuration.keys import KEYS, TrainConfig

MEASURED_ROW = 20  # of the run without the profiler: the iterations 11 to 20
SMALLEST = 0.1  # percent of an iteration; smaller parts of a step are one line, and the JSON has all


def find_record(out_dir: Path) -> dict[str, Any]:
    """The run record in out_dir. Raises ValueError or OSError."""
    path = max(run_records(out_dir), default=None)
    if path is None:
        raise ValueError(f"no run record in {out_dir}")
    return read_json(path)


def config_of(record: dict[str, Any]) -> TrainConfig:
    """As it was resolved."""
    return TrainConfig(**{name: value for name, value in record["config"].items() if name in KEYS})


def analyze(
    out_dir: Path, plain_dir: Path, roofline: dict[str, Any] | None, roofline_reason: str | None
) -> dict[str, Any]:
    """The content of profile.json, of a run with the profiler and one without. Raises RunError if rank 0
    has left nothing that can be read."""
    record = find_record(out_dir)
    config, info = config_of(record), record["startup_info"]
    rows = find_record(plain_dir)["training_iterations"]
    row = next(row for row in rows if row["iter"] == MEASURED_ROW)
    rank = read_rank(out_dir, 0)
    on_gpu = rank.facts["device"] == "cuda"  # on a CPU the profiler slows down the operators themselves
    found = breakdown(rank, Linears(config), row["time_ms"] if on_gpu else None)
    peak = info["hardware"]["peak"]
    flops = None if peak["tflops_per_gpu"] is None else 1e12 * peak["tflops_per_gpu"]
    ratio, reason = None, "the peak is no datasheet's, so it belongs to no clock"
    if flops and config.peak_tflops is None:
        ratio, reason = clock_ratio(flops / 2 if peak["sparse"] else flops, rank.facts, row)
    alone = 1000 * config.micro_steps * roofline["ceiling"]["matmul_seconds"] if roofline else None
    return {
        "device": info["hardware"]["gpu_name"],
        "processes": info["hardware"]["num_gpus"],
        "torch": info["software"].get("torch"),
        "unprofiled": row,
        "profiled": found,
        "adds_up": adds_up(found),
        "waterfall": waterfall(model_flops(config), found, flops, ratio, reason, alone),
        "roofline": roofline,
        "roofline_reason": roofline_reason,
        "config": record["config"],
    }


# --- text ---


def lines(content: dict[str, Any]) -> list[str]:
    found = content["profiled"]
    rows, small = [], dict.fromkeys((row["group"] for row in found["parts"]), 0.0)
    for row in found["parts"]:
        if row["percent"] < SMALLEST:
            small[row["group"]] += row["ms"]
        else:
            rows.append(_row(row["part"], row["group"], row["ms"], found["wall_ms"], row["tflops"]))
    rows += [_row("all smaller ones", group, ms, found["wall_ms"]) for group, ms in small.items() if ms]
    rows.append(_row("sum", "", found["sum_ms"], found["wall_ms"]))
    table = aligned(["part", "step", "ms", "%", "TFLOPS"], rows, ["part", "step"])
    of_ranks = f", {content['processes']} processes, rank 0" if content["processes"] > 1 else ""
    title = f"{content['device']}{of_ranks}: an iteration, mean of {found['iterations']}, takes "
    title += f"{found['wall_ms']:.3f} ms"
    return [title, "", *table, "", *_checks(content), "", *_waterfall_lines(content)]


def _row(part: str, group: str, ms: float, wall_ms: float, tflops: float | None = None) -> list[str]:
    return [part, group, f"{ms:.3f}", f"{100 * ms / wall_ms:.2f}", _number(tflops, "{:.4g}")]


def _checks(content: dict[str, Any]) -> list[str]:
    found = content["profiled"]
    difference = 100 * (found["trace_over_host_clock"] - 1)
    verdict = "adds up" if content["adds_up"] else "DOES NOT ADD UP within 1 %"
    text = [
        f"The table {verdict}: its sum is the wall clock of the trace, which differs from the host's clock "
        f"by {difference:+.2f} %."
    ]
    hidden = found["communication_hidden_ms"]
    if hidden or any(row["group"] == COMMUNICATION for row in found["parts"]):
        text.append(f"Communication that other kernels hide, and that is not in the table: {hidden:.3f} ms.")
    row = content["unprofiled"]
    mfu = f"MFU {row['mfu']['mfu_percent']:.2f} %" if row["mfu"] else "no MFU"
    slower = 100 * (found["wall_ms"] / row["time_ms"] - 1)
    text.append(
        f"Without the profiler, in a run of its own: {row['time_ms']:.3f} ms, {mfu}; the profiled iterations "
        f"take {slower:+.1f} %."
    )
    return text


def _waterfall_lines(content: dict[str, Any]) -> list[str]:
    found = content["waterfall"]
    in_points = found["unit"] == "points"
    title = "From 100 % to the measured MFU, in points" if in_points else "Where the milliseconds go"
    rows = [["peak", "", "", "100.000"]] if in_points else []
    rows += [
        [step["label"], *(_number(step[name], "{:.3f}") for name in ("ms", "points", "left_percent"))]
        for step in found["steps"]
    ]
    text = [title, *aligned(["step", "ms", "points lost", "MFU %"], rows, ["step"])]
    return text + [f"Note: {note}" for note in found["notes"]]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
