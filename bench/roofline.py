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
ON_A_CPU_S = 0.05  # of each operation
Call = Callable[[], object]


def seconds_per_call(call: Call, device: torch.device, spent_s: float) -> float:
    """The median of samples, each of as many calls as fill it, after a warm-up."""

    def sample(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    sample(1)  # not counted: the first call also initializes
    calls, began = 1, time.perf_counter()
    while time.perf_counter() - began < UNTIMED * spent_s:
        calls = max(1, round((1 - UNTIMED) * spent_s / SAMPLES / sample(calls)))
    return statistics.median(sample(calls) for _ in range(SAMPLES))


def matmul_shapes(config: ModelConfig) -> Counter:
    """(name, inputs, outputs) of every Linear of the model as it is built, and how many there are."""
    modules = model_builder.build_model(config).named_modules()
    linears = [(name, module) for name, module in modules if isinstance(module, torch.nn.Linear)]
    return Counter((name.split(".")[-1], each.in_features, each.out_features) for name, each in linears)


def runs_in_fp8(name: str, config: TrainConfig) -> bool:
    chosen = name != HEAD or config.low_precision_scope == "layers_and_head"
    return find("low_precision", config.low_precision).forms(native=True)[0].is_float8 and chosen


def products(M: int, K: int, N: int, dtype: str, device: torch.device) -> Iterator[tuple[str, Call]]:
    """(name, call) of the products of x (M, K) and a Linear's weight (N, K), in the layouts that autograd
    gives them; in fp8 as rows times columns, the only layout that the tensor cores of Hopper take."""
    if dtype != "fp8":
        shapes = ((M, K), (N, K), (M, N))
        x, weight, dy = (torch.randn(each, dtype=getattr(torch, dtype), device=device) for each in shapes)
        yield "forward", lambda: torch.mm(x, weight.t())
        yield "dgrad", lambda: torch.mm(dy, weight)
        yield "wgrad", lambda: torch.mm(dy.t(), x)
        return
    one = torch.ones((), device=device)  # scale of an operand
    sizes = {"forward": (M, K, N), "dgrad": (M, N, K), "wgrad": (N, M, K)}  # rows, inner, columns
    for name, (rows, inner, columns) in sizes.items():
        first = FORWARD if name == "forward" else GRADIENT
        a = torch.randn(rows, inner, dtype=torch.bfloat16, device=device).to(first)
        b = torch.randn(columns, inner, dtype=torch.bfloat16, device=device).to(FORWARD).t()
        # fast accumulation is not accurate enough for gradients (ops/float8.py)
        multiply = partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=name == "forward")
        yield name, partial(multiply, a, b, one, one)


def time_attention(config: TrainConfig, device: torch.device, spent_s: float) -> dict:
    """One layer's attention. Rates are by causal FLOPs: kernels skip the rest."""
    model, dtype = config.model_config(), DTYPES[config.dtype]
    choice = choose_attention(config.attention_backend, model, dtype, device, manual_attention)
    B, T, D = config.micro_batch, config.block_size, model.head_dim
    q, k, v = (
        torch.randn(B, T, heads, D, dtype=dtype, device=device, requires_grad=True)
        for heads in (model.n_head, model.n_kv_head, model.n_kv_head)
    )
    y = choice.attend(q, k, v, 0.0)
    dy = torch.randn_like(y)
    calls: dict[str, Call] = {
        "forward": lambda: choice.attend(q, k, v, 0.0),
        "backward": lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True),
    }
    seconds = {name: seconds_per_call(call, device, spent_s) for name, call in calls.items()}
    causal = {"forward": 2 * B * T * T * model.n_head * D}  # two products, half of each
    causal["backward"] = 2 * causal["forward"]  # four
    rates = {name: causal[name] / seconds[name] / 1e12 for name in calls}
    return {"used": choice.used, "kernel": choice.kernel, "seconds": seconds, "causal_tflops": rates}


def measure(config: TrainConfig, device: torch.device) -> dict:
    """Every rate, and the ceiling that follows from them, for one micro-batch on one GPU."""
    model, tokens = config.model_config(), config.micro_batch * config.block_size
    cases = [
        ({"name": name, "count": count, "dtype": dtype, "M": tokens, "K": inputs, "N": outputs}, in_fp8)
        for (name, inputs, outputs), count in matmul_shapes(model).items()
        for in_fp8 in {False, runs_in_fp8(name, config)}
        for dtype in ["fp8" if in_fp8 else str(DTYPES[config.dtype]).removeprefix("torch.")]
    ]
    spent_s, gpu = ON_A_CPU_S, None
    if device.type == "cuda":
        gpu, spent_s = torch.cuda.get_device_name(device), (BUDGET_S - HEAT_S) / (3 * len(cases) + 2)
        a, b = torch.randn(2, HEAT_N, HEAT_N, device=device).bfloat16()
        seconds_per_call(lambda: torch.mm(a, b), device, HEAT_S)
    matmuls = []
    for case, in_fp8 in cases:
        calls = products(case["M"], case["K"], case["N"], case["dtype"], device)
        seconds = {name: seconds_per_call(call, device, spent_s) for name, call in calls}
        rates = {name: 2 * case["M"] * case["K"] * case["N"] / each / 1e12 for name, each in seconds.items()}
        used = in_fp8 == runs_in_fp8(case["name"], config)
        matmuls.append({**case, "in_ceiling": used, "seconds": seconds, "tflops": rates})
    attention = {"count": model.n_layer, **time_attention(config, device, spent_s)}
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
        **dict.fromkeys(("tokens_per_sec", "tokens_per_sec_per_gpu"), rate),
        "mfu_percent": percent and percent * rate * flops["flops_per_token"],
        "mfu_causal_percent": percent and percent * rate * flops["flops_per_token_causal"],
        "peak_tflops": peak.tflops,
        "peak_source": peak.source,
        "peak_reason": peak.reason,
    }


def lines(measured: dict) -> list[str]:
    """The result for a reader."""
    found, attention = measured["ceiling"], measured["attention"]
    text = [f"{measured['device']}, {measured['tokens']:,} tokens, measured {measured['measured']}"]
    text.append("TFLOPS forward / dgrad / wgrad:")
    named = [(f"{m['name']} {m['K']} to {m['N']} {m['dtype']}", m, m["tflops"]) for m in measured["matmuls"]]
    kernel = f"attention {attention['used']} [{attention['kernel']}]"
    for name, each, rates in [*named, (kernel, attention, attention["causal_tflops"])]:
        text.append(f"{each['count']:4} x {name:<32} {' / '.join(f'{rate:.4g}' for rate in rates.values())}")
    mfu = f"{found['mfu_percent']:.2f} % MFU" if found["mfu_percent"] else f"no MFU: {found['peak_reason']}"
    return [*text, f"ceiling {found['tokens_per_sec']:,.0f} tokens/s per GPU, {mfu}"]


def main(argv: list[str]) -> int:
    config = load_run_config(argv)
    check_device(config)
    device = torch.device(config.device)
    config, _ = resolve_micro_batch(config, World(0, 0, 1, device))
    measured = measure(config, device)
    print("\n".join(lines(measured)))
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    leave_now(end_with_status(main, sys.argv[1:]))  # torch's own end takes most of a second
