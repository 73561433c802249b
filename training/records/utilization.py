"""Computes throughput and utilization. Pure functions of counts and seconds. Every figure says whether it is
global (all GPUs) or per GPU; numerator and denominator of a quotient always cover the same GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import model_builder
from common import units
from mfu_versions import model_builder_v1, model_builder_v2, model_builder_v3
from training.configuration.keys import TrainConfig
from training.hardware.peaks import Peak
from training.optimization.compile import is_recomputed
from training.records.machine import summarize_gpus
from training.records.percentiles import spread

FORMULAS = (model_builder_v1, model_builder_v2, model_builder_v3)


def recomputed_flops(flops: dict, config: TrainConfig) -> float | None:
    """FLOPs per token that activation checkpointing adds: one more forward of each recomputed block,
    attention (the full S x S scores) and feed-forward; or of every attention's two products, at the level
    'attention'. None if the formula does not count layers."""
    if config.activation_checkpointing == "attention":
        parts = [flops["components"].get(f"attention_{name}") for name in ("scores", "context")]
        return None if None in parts else sum(parts) / config.block_size
    blocks = sum(is_recomputed(i, config.activation_checkpointing) for i in range(config.n_layer))
    if not blocks:
        return 0
    if flops["ffn_flops_per_layer"] is None:
        return None
    per_sequence = flops["attention_flops_per_layer"] + flops["ffn_flops_per_layer"]
    return blocks * per_sequence / config.block_size


def document_flops(flops: dict, attended: float, block_size: int) -> float:
    """FLOPs per token, causal, if the documents of a token window do not see each other: the sum of their
    squared lengths is less than the window's. `attended` is sum(L^2) / sum(L) over documents of L tokens."""
    half_of_the_scores = flops["flops_per_token"] - flops["flops_per_token_causal"]
    return flops["flops_per_token"] - (2 - attended / block_size) * half_of_the_scores


def utilization(
    tokens_per_sec: float,
    num_gpus: int,
    flops: dict,
    peak: Peak,
    facts: dict,
    recomputed: float | None = 0,
) -> dict:
    """The record's mfu fields, from the global tokens/s. `flops` is count_flops()'s result; `facts` are
    constant fields (method, architecture, GPU name ...) that every log row repeats, so that it can be read
    alone. `recomputed` is recomputed_flops()'s: MFU never counts it, hfu_percent (hardware FLOPs
    utilization) does.

    Raises ValueError if the result is above 100 %: then the measurement, the peak or the count is wrong.
    """
    assert peak.flops is not None, peak.reason
    achieved = tokens_per_sec * flops["flops_per_token"]  # FLOP/s, all GPUs
    hardware_peak = peak.flops * num_gpus
    mfu = achieved / hardware_peak
    hfu = None if recomputed is None else 100 * (mfu + tokens_per_sec * recomputed / hardware_peak)
    most = next((one for one in peak.of_formats.values() if one.flops), peak)
    limit = (most.flops or peak.flops) * num_gpus
    if achieved > limit:
        raise ValueError(
            f"computed {100 * achieved / limit:.1f} % of the peak, which is impossible: "
            f"{units.flops(achieved)}LOPS achieved against {units.flops(limit)}LOPS "
            f"({most.source}); check peak_tflops and the GPU's name"
        )
    return {
        "mfu": mfu,
        "mfu_percent": 100 * mfu,
        "hfu_percent": hfu,
        "mfu_causal_percent": 100 * tokens_per_sec * flops["flops_per_token_causal"] / hardware_peak,
        "flops_per_token": flops["flops_per_token"],
        "flops_per_token_causal": flops["flops_per_token_causal"],
        "tokens_per_sec": tokens_per_sec,
        "tokens_per_sec_per_gpu": tokens_per_sec / num_gpus,
        "achieved_tflops": achieved / 1e12,
        "achieved_tflops_per_gpu": achieved / 1e12 / num_gpus,
        "flops_achieved": achieved,
        "hardware_peak_flops": hardware_peak,
        "hardware_peak_tflops": hardware_peak / 1e12,
        "num_gpus": num_gpus,
        **_utilization_of_formats(achieved, mfu, peak, num_gpus),
        "sparse_mode": peak.sparse,
        "attention_flops_per_layer": flops["attention_flops_per_layer"],
        "ffn_flops_per_layer": flops["ffn_flops_per_layer"],
        "logit_flops": flops["logit_flops"],
        "attention_to_ffn_ratio": flops["attention_to_ffn_ratio"],
        **facts,
    }


def _utilization_of_formats(achieved: float, mfu: float, peak: Peak, num_gpus: int) -> dict:
    """The MFU of an fp8 or fp4 run against both peaks, each under its own name. mfu itself uses the bf16
    peak, so that it can be compared with runs in bf16."""
    found: dict[str, float | None] = {}
    for name, one in peak.of_formats.items():
        flops = one.flops and one.flops * num_gpus
        found["mfu_bf16_percent"] = 100 * mfu
        found[f"mfu_{name}_percent"] = flops and 100 * achieved / flops
        found[f"hardware_peak_{name}_tflops"] = flops and flops / 1e12
    return found


def audit_flops(meta_model: torch.nn.Module, flops: dict, seq_len: int, exact: bool) -> dict:
    """Compares the active formula with what torch's FlopCounterMode counts in one forward and backward of the
    same model on the meta device. Raises RuntimeError if a formula that claims to be exact is not."""
    ids = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        meta_model(ids, ids).backward()
    counted, formula = counter.get_total_flops(), flops["flops_per_token"] * seq_len
    if exact and counted != formula:
        raise RuntimeError(
            f"the FLOP formula counts {formula:,} for one sequence, torch's FlopCounterMode {counted:,}; "
            "an MFU from it would be wrong, so model_builder.py needs to learn about this model"
        )
    return {
        "counted_flops_per_sequence": counted,
        "formula_flops_per_sequence": formula,
        "formula_over_counted": formula / counted,
        "exact": counted == formula,
    }


def count_flops(config: TrainConfig) -> dict[str, Any]:
    """The record's startup_info.flops: the active formula's counts, all formulas' totals, and the audit of
    the active one. Raises RuntimeError if that formula claims to be exact and is not."""
    model_config = config.model_config()
    flops = model_builder.count_flops(model_config, config.block_size)
    flops["calculation_method"] = model_builder.CALCULATION_METHOD
    flops["totals"] = {
        formula.CALCULATION_METHOD: formula.count_flops(model_config, config.block_size)["flops_per_token"]
        for formula in FORMULAS
    }
    on_meta = model_builder.build_model(model_config)
    flops["audit"] = audit_flops(on_meta, flops, config.block_size, model_builder.EXACT)
    return flops


def summarize(rows: list[dict]) -> dict:
    """Medians with 10th and 90th percentiles over the log rows after warm-up; None where there are none."""
    steady = [row for row in rows if not row["warmup"]]
    return {
        "rows_after_warmup": len(steady),
        "time_ms": spread([row["time_ms"] for row in steady]),
        "tokens_per_sec": spread([row["tokens_per_sec"] for row in steady]),
        "tokens_per_sec_per_gpu": spread([row["tokens_per_sec_per_gpu"] for row in steady]),
        "mfu_percent": spread([row["mfu"]["mfu_percent"] for row in steady if row["mfu"]]),
        **summarize_gpus(steady),
    }
