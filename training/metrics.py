"""Throughput and utilization. Pure functions of counts and seconds; every figure says whether it is global
(all GPUs) or per GPU, and the numerator and denominator of a quotient always cover the same GPUs."""

from __future__ import annotations

import statistics

import torch
from torch.utils.flop_counter import FlopCounterMode

from training.hardware import Peak

WARMUP_ITERS = 5  # of this process; rows that include one of them stay out of the medians


def utilization(tokens_per_sec: float, num_gpus: int, flops: dict, peak: Peak, facts: dict) -> dict:
    """The record's mfu fields, from the global tokens/s. `flops` is count_flops' result; `facts` are constant
    fields (method, architecture, GPU name ...) that every row repeats, so that one row can be read alone.

    Raises ValueError if the result is above 100 %: then the measurement, the peak or the count is wrong.
    """
    achieved = tokens_per_sec * flops["flops_per_token"]  # FLOP/s, all GPUs
    hardware_peak = peak.flops * num_gpus
    mfu = achieved / hardware_peak
    if mfu > 1.0:
        raise ValueError(
            f"computed {100 * mfu:.1f} % of the peak, which is impossible: {achieved / 1e12:.1f} TFLOPS "
            f"achieved against {hardware_peak / 1e12:.1f} ({peak.source}); "
            "check peak_tflops and the GPU's name"
        )
    return {
        "mfu": mfu,
        "mfu_percent": 100 * mfu,
        "mfu_causal_percent": 100 * tokens_per_sec * flops["flops_per_token_causal"] / hardware_peak,
        "flops_per_token": flops["flops_per_token"],
        "tokens_per_sec": tokens_per_sec,
        "tokens_per_sec_per_gpu": tokens_per_sec / num_gpus,
        "achieved_tflops": achieved / 1e12,
        "achieved_tflops_per_gpu": achieved / 1e12 / num_gpus,
        "flops_achieved": achieved,
        "hardware_peak_flops": hardware_peak,
        "hardware_peak_tflops": hardware_peak / 1e12,
        "num_gpus": num_gpus,
        "sparse_mode": peak.sparse,
        "attention_flops_per_layer": flops["attention_flops_per_layer"],
        "ffn_flops_per_layer": flops["ffn_flops_per_layer"],
        "logit_flops": flops["logit_flops"],
        "attention_to_ffn_ratio": flops["attention_to_ffn_ratio"],
        **facts,
    }


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


def summarize(rows: list[dict]) -> dict:
    """Medians with their 10th and 90th percentiles over the rows after warm-up; None where there are none."""
    steady = [row for row in rows if not row["warmup"]]
    return {
        "rows_after_warmup": len(steady),
        "time_ms": _spread([row["time_ms"] for row in steady]),
        "tokens_per_sec": _spread([row["tokens_per_sec"] for row in steady]),
        "tokens_per_sec_per_gpu": _spread([row["tokens_per_sec_per_gpu"] for row in steady]),
        "mfu_percent": _spread([row["mfu"]["mfu_percent"] for row in steady if row["mfu"]]),
    }


def _spread(values: list[float]) -> dict | None:
    if not values:
        return None
    ordered = sorted(values)
    p10, p90 = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.9))
    return {"median": statistics.median(ordered), "p10": p10, "p90": p90}
