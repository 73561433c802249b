"""The ceiling of this machine for this model: the time of its matmuls and its attention, if nothing else ran.

    python -m bench.roofline config/full_qwen3_1.8b_optimal.py --batch_size=16

Each matmul at its own shape (forward, gradient of the input, gradient of the weight; M = the tokens of a
micro-batch), in the compute dtype; attention forward and backward by the kernel that the trainer chooses. One
after another they are the shortest possible micro-step, so the share of this ceiling that a run reaches says
what is left in everything else: norms, casts, loss, optimizer, launches, communication. With a recipe that
has one scale for a tensor, the matmuls that it covers are timed in fp8, too, without the casts, and the
ceiling takes these. Other recipes have the ceiling of bf16.

The traps: a GPU at its power limit runs the first tenth of a second faster than the rest, and zeros draw less
power than data. So each figure is the median of several samples after work that warmed the GPU up, on random
numbers. It takes BUDGET_S, however many operations there are. The last line of the output is JSON.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

import model_builder
from bench.process import end_with_status
from mfu_versions import model_builder_v3 as v3
from model import manual_attention
from model_config import ModelConfig
from ops.float8 import FORWARD, GRADIENT
from training.configuration.choices import find
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.hardware.attention_kernels import choose_attention
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


class Timing(NamedTuple):
    """How long an operation is timed."""

    warmup_s: float
    sample_s: float
    samples: int


ON_A_CPU = Timing(0.02, 0.005, 5)


# --- seconds of single operations ---


def share_of_budget(operations: int, device: torch.device) -> Timing:
    """How long each of so many operations is timed."""
    if device.type == "cpu":
        return ON_A_CPU
    seconds = (BUDGET_S - HEAT_S) / operations
    return Timing(UNTIMED * seconds, (1 - UNTIMED) * seconds / SAMPLES, SAMPLES)


def heat(device: torch.device) -> None:
    """Matmuls until the GPU's clock is that of sustained work."""
    if device.type == "cuda":
        a, b = torch.randn(2, HEAT_N, HEAT_N, device=device).bfloat16()
        seconds_per_call(lambda: torch.mm(a, b), device, Timing(HEAT_S, 0.0, 1))


def time_matmul(M: int, K: int, N: int, dtype: str, device: torch.device, timing: Timing) -> dict:
    """Seconds and TFLOPS of x (M, K) times a Linear's weight (N, K), and of its two gradients."""
    calls = products(M, K, N, dtype, device)
    seconds = {name: seconds_per_call(call, device, timing) for name, call in calls}
    rates = {name: 2 * M * K * N / value / 1e12 for name, value in seconds.items()}
    return {"M": M, "K": K, "N": N, "seconds": seconds, "tflops": rates}


def products(
    M: int, K: int, N: int, dtype: str, device: torch.device
) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """(name, call) of a Linear's products, in the layouts that autograd gives them; in fp8 as rows times
    columns, the only layout that the tensor cores of Hopper take."""
    if dtype != "fp8":
        shapes = ((M, K), (N, K), (M, N))
        x, weight, dy = (torch.randn(each, dtype=getattr(torch, dtype), device=device) for each in shapes)
        yield "forward", lambda: torch.mm(x, weight.t())
        yield "dgrad", lambda: torch.mm(dy, weight)
        yield "wgrad", lambda: torch.mm(dy.t(), x)
        return
    one = torch.ones((), device=device)  # scale of an operand
    passes = {  # (rows, inner, columns), dtype of the first operand
        "forward": ((M, K, N), FORWARD),
        "dgrad": ((M, N, K), GRADIENT),
        "wgrad": ((N, M, K), GRADIENT),
    }
    for name, ((rows, inner, columns), first) in passes.items():
        a = torch.randn(rows, inner, dtype=torch.bfloat16, device=device).to(first)
        b = torch.randn(columns, inner, dtype=torch.bfloat16, device=device).to(FORWARD).t()
        # fast accumulation is not accurate enough for gradients (ops/float8.py)
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=name == "forward")
        yield name, partial(multiply, a, b, one, one)


def time_attention(
    config: TrainConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, timing: Timing
) -> dict:
    """One layer's attention. Rates are by causal FLOPs: kernels skip the rest."""
    choice = choose_attention(config.attention_backend, model, dtype, device, manual_attention)
    B, T, D = config.micro_batch, config.block_size, model.head_dim
    q, k, v = (
        torch.randn(B, T, heads, D, dtype=dtype, device=device, requires_grad=True)
        for heads in (model.n_head, model.n_kv_head, model.n_kv_head)
    )
    y = choice.attend(q, k, v, 0.0)
    dy = torch.randn_like(y)
    calls = {
        "forward": lambda: choice.attend(q, k, v, 0.0),
        "backward": lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True),
    }
    seconds = {name: seconds_per_call(call, device, timing) for name, call in calls.items()}
    causal = 2 * B * T * T * model.n_head * D  # two products, half of each; backward has four
    rates = {
        name: causal * factor / seconds[name] / 1e12 for name, factor in (("forward", 1), ("backward", 2))
    }
    return {"used": choice.used, "kernel": choice.kernel, "seconds": seconds, "causal_tflops": rates}


def seconds_per_call(call: Callable[[], object], device: torch.device, timing: Timing) -> float:
    """The median of samples, each of as many calls as fill it, after the warm-up."""

    def sample(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    sample(1)  # not counted: the first call also initializes
    calls, began = 1, time.perf_counter()
    while time.perf_counter() - began < timing.warmup_s:
        calls = max(1, round(timing.sample_s / sample(calls)))
    return statistics.median(sample(calls) for _ in range(timing.samples))


# --- the ceiling ---


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
