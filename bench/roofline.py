"""The ceiling of this machine for this model: the time of its matmuls and its attention, if nothing else ran.

    python -m bench.roofline config/full_qwen3_1.8b_optimal.py --batch_size=16

Each matmul at its own shape (forward, gradient of the input, gradient of the weight; M = the tokens of a
micro-batch), in the compute dtype; attention forward and backward by the kernel that the trainer chooses.
Matmuls and attention one after another are the shortest possible micro-step, so the share of
this ceiling that a run reaches says what is left in everything else: norms, casts, loss, optimizer, launches,
communication.

With a recipe that has one scale for a tensor, the matmuls that it covers are timed in fp8, too, without the
casts, and the ceiling takes these. Other recipes have the ceiling of bf16.

It takes BUDGET_S, however many operations there are. The last line of the output is one line of JSON.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections import Counter

import torch

import model_builder
from bench.operations import ON_A_CPU, Timing, seconds_per_call, time_attention, time_matmul
from bench.process import end_with_status
from mfu_versions import model_builder_v3 as v3
from model_config import ModelConfig
from training.configuration.choices import find
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.hardware.peaks import Peak, resolve_peak
from training.memory.micro_batch import resolve_micro_batch
from training.pretrained.settings import load_run_config
from training.process.exit_status import leave_now
from training.process.world import World, check_device

HEAD = "lm_head"  # the one matmul outside the blocks
# Of a GPU's time, for all operations together. One second of matmuls first brings the chip to the clock that
# its power allows. The operations follow one another without a pause, so it stays there, and each needs only
# a fraction of a second: a quarter of it is not timed, as neighbors draw different power.
BUDGET_S, HEAT_S = 4.0, 1.0
HEAT_N = 8192  # of the square matrices
SAMPLES, UNTIMED = 6, 0.25


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
    cases = [
        (name, inputs, outputs, count, kind)
        for (name, inputs, outputs), count in matmul_shapes(model).items()
        for kind in (str(dtype).removeprefix("torch."), *["fp8"] * runs_in_fp8(name, config))
    ]
    timing = share_of_budget(3 * len(cases) + 2, device)
    heat(device)
    matmuls = []
    for name, inputs, outputs, count, kind in cases:
        timed = time_matmul(tokens, inputs, outputs, kind, device, timing)
        used = (kind == "fp8") == runs_in_fp8(name, config)
        matmuls.append({"name": name, "count": count, "dtype": kind, "in_ceiling": used, **timed})
    attention = {"count": model.n_layer, **time_attention(config, model, dtype, device, timing)}
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    peak = resolve_peak(config.peak_tflops, gpu, config.dtype, config.use_sparse_specs, device)
    return {
        "device": gpu or "CPU",
        "measured": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "tokens": tokens,
        "matmuls": matmuls,
        "attention": attention,
        "ceiling": ceiling(config, tokens, matmuls, attention, peak),
    }


def share_of_budget(operations: int, device: torch.device) -> Timing:
    """How long each of so many operations is timed."""
    if device.type == "cpu":
        return ON_A_CPU
    seconds = (BUDGET_S - HEAT_S) / operations
    return Timing(UNTIMED * seconds, (1 - UNTIMED) * seconds / SAMPLES, SAMPLES)


def heat(device: torch.device) -> None:
    """Matmuls until the GPU's clock is that of sustained work."""
    if device.type == "cpu":
        return
    a, b = torch.randn(2, HEAT_N, HEAT_N, device=device).bfloat16()
    seconds_per_call(lambda: torch.mm(a, b), device, Timing(HEAT_S, 0.0, 1))


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
    chosen = name != HEAD or config.low_precision_scope == "layers_and_head"
    return find("low_precision", config.low_precision).forms(native=True)[0].is_float8 and chosen


def lines(measured: dict) -> list[str]:
    """The result for a reader."""
    tokens, found = measured["tokens"], measured["ceiling"]
    text = [f"{measured['device']}, {tokens:,} tokens, measured {measured['measured']}"]
    text.append("TFLOPS forward / dgrad / wgrad:")
    for m in measured["matmuls"]:
        rates = " / ".join(f"{rate:.4g}" for rate in m["tflops"].values())
        text.append(f"{m['count']:4} x {m['name']:<8} {m['K']:>6} to {m['N']:<6} {m['dtype']:<9} {rates}")
    attention = measured["attention"]
    rates = " / ".join(f"{rate:.4g}" for rate in attention["causal_tflops"].values())
    text.append(f"{attention['count']:4} x attention, {attention['used']} [{attention['kernel']}]: {rates}")
    mfu = f"{found['mfu_percent']:.2f} % MFU" if found["mfu_percent"] else f"no MFU: {found['peak_reason']}"
    text.append(f"ceiling {found['tokens_per_sec']:,.0f} tokens/s per GPU, {mfu}")
    return text


if __name__ == "__main__":
    leave_now(end_with_status(main, sys.argv[1:]))  # torch's own end takes most of a second
