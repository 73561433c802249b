"""Estimates how long a run takes and what it costs, from an MFU that is stated together with its source."""

from __future__ import annotations

from typing import Any, NamedTuple

from common import units
from mfu_versions import model_builder_v3 as v3
from training.configuration.keys import TrainConfig
from training.hardware.peaks import find_gpu
from training.records.utilization import recomputed_flops

# {(GPU, low precision): (MFU in percent of the bf16 peak by v3, its file in seals/)}: one GPU, no
# recomputation, models of 1.8 B parameters
MEASURED = {
    ("H200 SXM", "none"): (62.2, "qwen3_1.8b_h200"),
    ("H100 SXM", "none"): (58.8, "qwen3_1.8b_h100"),
    ("H200 SXM", "fp8_tensorwise"): (80.0, "qwen3_1.8b_fp8_layers_h200"),
    ("H200 SXM", "fp8_tensorwise, the head too"): (88.5, "qwen3_1.8b_fp8_h200"),
    ("CPU", "none"): (53.6, "quickstart_cpu"),
}
ASSUMED = 40.0  # percent, for every GPU and size of model that is not measured
RATIOS_OF = "H200 SXM"  # a recipe's gain there is taken for a GPU whose bf16 figure alone is measured
SMALL_MODEL = 1e9  # parameters below which a GPU reaches less than what was measured


class Expected(NamedTuple):
    mfu_percent: float
    tokens_per_sec: float  # of all GPUs
    source: str  # "measured: ..." or "assumed: ..."


def expected_speed(
    config: TrainConfig, flops: dict[str, Any], parameters: int, device: str, peak_tflops: float, gpus: int
) -> Expected | None:
    """flops: what the formula counts; device: the name of a GPU, or of a CPU; peak_tflops: of one GPU, for
    the dtype. A recomputed forward takes its share of the time, which MFU does not count. None: not known."""
    percent, source = _expected_mfu(config, parameters, device)
    if percent is None:
        return None
    if gpus > 1 and source.startswith("measured"):
        source += f", on one GPU and not on {gpus}"
    per_token = flops["totals"][v3.CALCULATION_METHOD]
    percent *= per_token / (per_token + (recomputed_flops(flops, config) or 0))
    return Expected(percent, percent / 100 * peak_tflops * 1e12 * gpus / per_token, source)


def _expected_mfu(config: TrainConfig, parameters: int, device: str) -> tuple[float | None, str]:
    """(percent, where it is from); None where another precision is measured: a guess beside it misleads."""
    gpu, on_cpu = find_gpu(device), config.device == "cpu"
    name = "CPU" if on_cpu else gpu.name if gpu else device
    with_head = config.low_precision_scope == "layers_and_head"
    kind = config.low_precision + ", the head too" * (with_head and config.low_precision != "none")
    kind = kind if on_cpu or config.dtype == "bfloat16" else config.dtype
    usual, found = MEASURED.get((name, "none")), MEASURED.get((name, kind))
    if not usual or (parameters < SMALL_MODEL and not on_cpu):
        return ASSUMED, "assumed: not measured"
    if found:
        return found[0], f"measured: seals/{found[1]}.seal.json"
    if on_cpu or (RATIOS_OF, kind) not in MEASURED:
        return None, ""
    gain = MEASURED[RATIOS_OF, kind][0] / MEASURED[RATIOS_OF, "none"][0]
    source = f"measured: bf16, seals/{usual[1]}.seal.json; times {gain:.2f}, measured on the {RATIOS_OF}"
    return usual[0] * gain, source


def expected_rows(config: TrainConfig, info: dict[str, Any], start: int) -> list[tuple[str, str]]:
    """Of the start-up report, for the iterations from `start` on."""
    hardware, iterations = info["hardware"], config.max_iters - start
    if config.eval_only or iterations <= 0:
        return []
    peak, gpus = hardware["peak"]["tflops_per_gpu"], hardware["num_gpus"]
    if peak is None or hardware["peak"]["sparse"]:
        return [("Expected time", "not known without a dense peak; state one: --peak_tflops")]
    device = hardware["gpu_name"].removesuffix(" (dry run)")
    speed = expected_speed(config, info["flops"], info["model"]["total_params"], device, peak, gpus)
    if speed is None:
        return [("Expected time", "not known: this precision was not measured here, as another was")]
    seconds = iterations * info["tokens_per_iter"] / speed.tokens_per_sec
    said = f"{units.duration(seconds)} for {iterations:,} iterations at {speed.tokens_per_sec:,.0f} tokens/s"
    memory = info["micro_batch"]
    fits = "" if memory["needed_gib"] <= memory["available_gib"] else "; by the estimate it does not fit"
    rows = [
        ("Expected time", f"{said}, evaluations not counted{fits}"),
        ("  from an MFU of", f"{speed.mfu_percent:.1f} % by v3 ({speed.source})"),
    ]
    if config.price is not None:
        hours = gpus * seconds / 3600
        cost = f"{config.price * hours:,.2f}: {hours:,.2f} GPU-hours at {config.price:,.2f} each"
        rows.append(("Expected cost", cost))
    return rows
