"""Counts a record again, from the record alone: the model that its settings make, that model's FLOPs by all
three formulas, tokens/s and MFU of each row, the medians, and when its loss_targets were reached.

The record may be anybody's: whoever calls this does so within contents.readable().
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from common.text import shown
from common.time_to_loss import describe_targets
from model_config import ModelConfig
from training.configuration.keys import KEYS, TrainConfig
from training.hardware.peaks import FORMATS, table_peak
from training.process.work_timer import UNMEASURED_ITERS
from training.records.utilization import FORMULAS, document_flops, summarize

ROUNDING = 1e-9  # relative: what adding and dividing in another order changes
SHOWN = 5  # figures that are named; the others are counted
Figure = tuple[str, Any, Any]  # its name, as stated, as made from the rest of the seal


def recount(record: dict[str, Any]) -> list[tuple[str, int, int, float | None, float | None]]:
    """(formula, FLOPs/token, causal ones, MFU, causal MFU) by v1, v2 and v3, from the median of tokens/s. An
    MFU is in percent, and None without a peak."""
    rate, peak = record["summary"]["tokens_per_sec"], _peak_flops(record["startup_info"]["hardware"])
    share = 100 * rate["median"] / peak if rate and peak else None
    found = []
    for formula, flops in _counts(_model(record["config"])).items():
        full, causal = flops["flops_per_token"], flops["flops_per_token_causal"]
        found.append((formula, full, causal, share and share * full, share and share * causal))
    return found


def disagreements(seal: dict[str, Any]) -> list[str]:
    """A line for each figure that does not follow from the rest of the seal."""
    record = seal["record"]
    figures = [*_settings(record), *_rows(record)]
    git = record["startup_info"].get("git") or {}
    figures += [(f"code.{name}", seal["code"][name], git.get(name)) for name in ("commit", "modified")]
    wrong = [line for figure in figures for line in _differences(*figure)]
    return wrong[:SHOWN] + [f"{len(wrong) - SHOWN} more figures"] * (len(wrong) > SHOWN)


def _settings(record: dict[str, Any]) -> Iterator[Figure]:
    """What follows from the configuration and the machine."""
    startup, config = record["startup_info"], record["config"]
    flops, hardware, model = startup["flops"], startup["hardware"], _model(config)
    for field, made in model.to_dict().items():
        yield f"model.architecture.{field}", startup["model"]["architecture"].get(field), made
    counts = _counts(model)
    for formula, found in counts.items():
        yield f"flops.totals.{formula}", flops["totals"].get(formula), found["flops_per_token"]
    for name in ("flops_per_token", "flops_per_token_causal"):
        yield f"flops.{name}", flops[name], counts[flops["calculation_method"]][name]
    factors = [config[key] for key in ("batch_size", "gradient_accumulation_steps", "block_size")]
    yield "tokens_per_iter", startup["tokens_per_iter"], math.prod(factors) * hardware["num_gpus"]
    peak = hardware["peak"]
    known = table_peak(str(hardware["gpu_name"]), hardware["precision"], bool(peak["sparse"]))
    has_peak = peak["tflops_per_gpu"] is not None  # unequal GPUs have none
    if known.tflops and has_peak and (config["peak_tflops"] is None or peak["source"] == known.source):
        yield "hardware.peak.tflops_per_gpu", peak["tflops_per_gpu"], known.tflops


def _rows(record: dict[str, Any]) -> Iterator[Figure]:
    """Each row of the last attempt, and the summary. No row is absent, or called warm-up to be left out."""
    summary, iterations = record["summary"], [row["iter"] for row in record["training_iterations"]]
    yield "iterations of the rows", iterations, sorted(set(iterations))
    interval, final = record["config"]["log_interval"], summary["final_iter"]
    due = range(-(-iterations[0] // interval) * interval, final + 1, interval)
    logged = sum(iteration % interval == 0 for iteration in iterations)
    yield f"number of rows, one in {interval} iterations,", logged, len(due)
    rows = [row for row in record["training_iterations"] if row["attempt"] == record["attempt"]]
    start = first = record["attempts"][-1]["start_iter"]
    seen = None if start else 0
    for row in rows:
        made = _row(record, row, start == first) | {"warmup": start < first + UNMEASURED_ITERS}
        if "tokens_seen" in row:
            if seen is not None:
                length = row["iter"] + 1 - start
                made["tokens_seen"] = seen + length * record["startup_info"]["tokens_per_iter"]
            seen = row["tokens_seen"]
        for name, value in made.items():
            yield f"iteration {row['iter']}: {name}", row[name], value
        start = row["iter"] + 1
    made = {**summarize(rows), "final_iter": iterations[-1], "final_loss": rows[-1]["loss"]}
    for name, value in made.items():
        if name in summary:
            yield f"summary.{name}", summary[name], value
    stated = {each["loss"]: each for each in summary.get("loss_targets") or []}
    targets = {each["loss"]: each for each in describe_targets(record)}
    for loss in stated | targets:
        told, found = stated.get(loss), targets.get(loss)
        if found and told:
            found = dict.fromkeys(told) | found  # a record may claim more
        yield f"summary.loss_targets, {loss:g}", told, found


def _row(record: dict[str, Any], row: dict[str, Any], is_first: bool) -> dict[str, Any]:
    """tokens/s and MFU. A row has no MFU if it is the first, which includes compilation, or if that would be
    above 100 %, for which train.py writes none."""
    startup, rate, mfu = record["startup_info"], row["tokens_per_sec"], row["mfu"]
    hardware, peak, flops = startup["hardware"], _peak_flops(startup["hardware"]), startup["flops"]
    made = {
        "tokens_per_sec": 1e3 * startup["tokens_per_iter"] / row["time_ms"],
        "tokens_per_sec_per_gpu": rate / hardware["num_gpus"],
        "mfu": None,
    }
    most = next(filter(None, (_peak_flops(hardware, f"peak_{name}") for name in FORMATS)), peak)
    if is_first or peak is None or most is None or rate * flops["flops_per_token"] > most:
        return made
    causal = flops["flops_per_token_causal"]
    if record["config"].get("doc_masking"):
        causal = document_flops(flops, mfu["document_length_per_token"], record["config"]["block_size"])
    figures = {
        "mfu": rate / peak * flops["flops_per_token"],
        "mfu_percent": 100 * rate / peak * flops["flops_per_token"],
        "mfu_causal_percent": 100 * rate / peak * causal,
        "hardware_peak_tflops": peak / 1e12,
        "num_gpus": hardware["num_gpus"],
        "gpu_name": hardware["gpu_name"],
        "calculation_method": flops["calculation_method"],
    }
    return {**made, "mfu": figures}


def _model(config: dict[str, Any]) -> ModelConfig:
    return TrainConfig(**{name: value for name, value in config.items() if name in KEYS}).model_config()


def _counts(model: ModelConfig) -> dict[str, dict]:
    return {module.CALCULATION_METHOD: module.count_flops(model, model.block_size) for module in FORMULAS}


def _peak_flops(hardware: dict[str, Any], peak: str = "peak") -> float | None:
    """Of all GPUs, per second."""
    tflops = (hardware.get(peak) or {}).get("tflops_per_gpu")
    return None if tflops is None else tflops * 1e12 * hardware["num_gpus"]


def _differences(name: str, stated: Any, made: Any) -> Iterator[str]:
    """Beyond rounding; and nan, the loss of a run that diverged, is itself."""
    if isinstance(made, dict) and isinstance(stated, dict):
        for part, value in made.items():
            yield from _differences(f"{name}.{part}", stated.get(part), value)
        return
    numbers = all(isinstance(each, int | float) for each in (stated, made))
    if not (numbers and math.isclose(stated, made, rel_tol=ROUNDING) or repr(stated) == repr(made)):
        yield f"{name} is {shown(stated)}, and the rest makes {shown(made)}"
