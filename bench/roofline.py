"""The ceiling of this machine for this model: the time of its matmuls and its attention, if nothing else ran.

    python -m bench.roofline config/full_qwen3_1.8b_optimal.py --batch_size=16

Each matmul at its own shape (forward, gradient of the input, gradient of the weight; M = the tokens of a
micro-batch), in the compute dtype; attention forward and backward by the kernel that the trainer chooses; and
copy bandwidth. Matmuls and attention one after another are the shortest possible micro-step, so the share of
this ceiling that a run reaches says what is left in everything else: norms, casts, loss, optimizer, launches,
communication.

With low_precision the matmuls that it covers are timed in fp8, too, without the casts, and the ceiling takes
these. The last line of the output is one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch

import model_builder
from bench.operations import copy_bandwidth, time_attention, time_matmul
from bench.process import end_with_status
from mfu_versions import model_builder_v3 as v3
from model_config import ModelConfig
from ops.recipes import ONE_SCALE
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.hardware.peaks import Peak, resolve_peak
from training.pretrained.settings import load_run_config
from training.process.world import World, check_device
from training.records.micro_batch import resolve_micro_batch

HEAD = "lm_head"  # the one matmul outside the blocks


def main(argv: list[str]) -> int:
    config = load_run_config(argv)
    check_device(config)
    device = torch.device(config.device)
    config, _ = resolve_micro_batch(config, World(0, 0, 1, device))
    measured = measure(config, device)
    print("\n".join(lines(measured)))
    print(json.dumps(measured))
    return 0


def measure(config: TrainConfig, device: torch.device) -> dict:
    """Every rate, and the ceiling that follows from them, for one micro-batch on one GPU."""
    model, dtype = config.model_config(), DTYPES[config.dtype]
    tokens = config.micro_batch * config.block_size
    matmuls = []
    for (name, inputs, outputs), count in matmul_shapes(model).items():
        low = runs_in_fp8(name, config)
        for kind in (str(dtype).removeprefix("torch."), *["fp8"] * low):
            timed = time_matmul(tokens, inputs, outputs, kind, device)
            used = (kind == "fp8") == low
            matmuls.append({"name": name, "count": count, "dtype": kind, "in_ceiling": used, **timed})
    attention = {"count": model.n_layer, **time_attention(config, model, dtype, device)}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    peak = resolve_peak(config.peak_tflops, gpu, config.dtype, config.use_sparse_specs, device)
    return {
        "device": gpu or "CPU",
        "tokens": tokens,
        "matmuls": matmuls,
        "attention": attention,
        "copy_gb_per_s": copy_bandwidth(device),
        "ceiling": ceiling(config, tokens, matmuls, attention, peak),
    }


def ceiling(config: TrainConfig, tokens: int, matmuls: list[dict], attention: dict, peak: Peak) -> dict:
    """Seconds of a micro-batch if nothing but matmuls and attention took time, and the MFU that this is."""
    flops = v3.count_flops(config.model_config(), config.block_size)
    in_matmuls = sum(m["count"] * sum(m["seconds"].values()) for m in matmuls if m["in_ceiling"])
    in_attention = attention["count"] * sum(attention["seconds"].values())
    rate = tokens / (in_matmuls + in_attention)
    percent = 100 / peak.flops if peak.flops else None
    return {
        "matmul_seconds": in_matmuls,
        "attention_seconds": in_attention,
        "tokens_per_sec": rate,
        "mfu_percent": percent and percent * rate * flops["flops_per_token"],
        "mfu_causal_percent": percent and percent * rate * flops["flops_per_token_causal"],
        "peak_tflops": peak.tflops,
        "peak_source": peak.source,
        "peak_reason": peak.reason,
    }


def matmul_shapes(config: ModelConfig) -> Counter:
    """(name, inputs, outputs) of every Linear of the model as it is built, and how many there are."""
    modules = model_builder.build_model(config).named_modules()
    linears = [
        (name.split(".")[-1], module) for name, module in modules if isinstance(module, torch.nn.Linear)
    ]
    return Counter((name, linear.in_features, linear.out_features) for name, linear in linears)


def runs_in_fp8(name: str, config: TrainConfig) -> bool:
    low = config.low_precision in ONE_SCALE  # other recipes are emulated in bf16
    return low and (name != HEAD or config.low_precision_scope == "layers_and_head")


def lines(measured: dict) -> list[str]:
    """The result for a reader."""
    tokens, found = measured["tokens"], measured["ceiling"]
    text = [f"{measured['device']}, {tokens:,} tokens; TFLOPS forward / dgrad / wgrad"]
    for m in measured["matmuls"]:
        rates = " / ".join(f"{rate:.4g}" for rate in m["tflops"].values())
        text.append(f"{m['count']:4} x {m['name']:<8} {m['K']:>6} to {m['N']:<6} {m['dtype']:<9} {rates}")
    attention = measured["attention"]
    rates = " / ".join(f"{rate:.4g}" for rate in attention["causal_tflops"].values())
    text.append(f"{attention['count']:4} x attention, {attention['used']} [{attention['kernel']}]: {rates}")
    text.append(f"copy {measured['copy_gb_per_s']:.4g} GB/s")
    mfu = f"{found['mfu_percent']:.2f} % MFU" if found["mfu_percent"] else f"no MFU: {found['peak_reason']}"
    text.append(f"ceiling {found['tokens_per_sec']:,.0f} tokens/s per GPU, {mfu}")
    return text


if __name__ == "__main__":
    sys.exit(end_with_status(main, sys.argv[1:]))
