"""Seconds of single operations on this machine: a Linear's three products, one layer's attention.

The traps: a GPU at its power limit runs the first tenth of a second faster than the rest, and zeros draw less
power than data. So each figure is the median of several samples after work that warmed the GPU up, on random
numbers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from model import manual_attention
from model_config import ModelConfig
from ops.float8 import FORWARD, GRADIENT
from training.configuration.keys import TrainConfig
from training.hardware.attention_kernels import AttentionChoice, choose_attention


class Timing(NamedTuple):
    """How long an operation is timed."""

    warmup_s: float
    sample_s: float
    samples: int


ON_A_CPU = Timing(0.02, 0.005, 5)


def time_matmul(M: int, K: int, N: int, dtype: str, device: torch.device, timing: Timing) -> dict:
    """Seconds and TFLOPS of x (M, K) times a Linear's weight (N, K), and of its two gradients."""
    make = _fp8_products if dtype == "fp8" else _products
    calls = make(M, K, N, dtype, device)
    seconds = {name: seconds_per_call(call, device, timing) for name, call in calls}
    rates = {name: 2 * M * K * N / value / 1e12 for name, value in seconds.items()}
    return {"M": M, "K": K, "N": N, "seconds": seconds, "tflops": rates}


def _products(M: int, K: int, N: int, dtype: str, device: torch.device):
    """The three products in the layouts that autograd gives them."""
    x, weight, dy = (_random(shape, getattr(torch, dtype), device) for shape in ((M, K), (N, K), (M, N)))
    yield "forward", lambda: torch.mm(x, weight.t())
    yield "dgrad", lambda: torch.mm(dy, weight)
    yield "wgrad", lambda: torch.mm(dy.t(), x)


def _fp8_products(M: int, K: int, N: int, dtype: str, device: torch.device):
    """The same as rows times columns: the only layout that fp8 tensor cores of Hopper take."""
    one = torch.ones((), device=device)  # scale of an operand
    passes = {  # (rows, inner, columns), dtype of the first operand
        "forward": ((M, K, N), FORWARD),
        "dgrad": ((M, N, K), GRADIENT),
        "wgrad": ((N, M, K), GRADIENT),
    }
    for name, ((rows, inner, columns), first) in passes.items():
        a = _random((rows, inner), torch.bfloat16, device).to(first)
        b = _random((columns, inner), torch.bfloat16, device).to(FORWARD).t()
        fast = name == "forward"  # not accurate enough for gradients (ops/float8.py)
        yield (
            name,
            lambda a=a, b=b, fast=fast: torch._scaled_mm(
                a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
            ),
        )


def time_attention(
    config: TrainConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    timing: Timing,
    choice: AttentionChoice | None = None,
) -> dict:
    """One layer's attention, by this choice's kernel. Rates are by causal FLOPs: kernels skip the rest."""
    choice = choice or choose_attention(config.attention_backend, model, dtype, device, manual_attention)
    B, T, D = config.micro_batch, config.block_size, model.head_dim
    q, k, v = (
        _random((B, T, heads, D), dtype, device).requires_grad_()
        for heads in (model.n_head, model.n_kv_head, model.n_kv_head)
    )
    y = choice.attend(q, k, v, 0.0)
    dy = torch.randn_like(y)
    seconds = {
        "forward": seconds_per_call(lambda: choice.attend(q, k, v, 0.0), device, timing),
        "backward": seconds_per_call(
            lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), device, timing
        ),
    }
    causal = 2 * B * T * T * model.n_head * D  # two products, half of each
    rates = {
        "forward": causal / seconds["forward"] / 1e12,
        "backward": 2 * causal / seconds["backward"] / 1e12,
    }
    return {"used": choice.used, "kernel": choice.kernel, "seconds": seconds, "causal_tflops": rates}


def seconds_per_call(call: Callable[[], object], device: torch.device, timing: Timing) -> float:
    """The median of samples, each of as many calls as fill it, after the warm-up."""
    warmup_s, sample_s, samples = timing

    def sample(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / calls

    sample(1)  # not counted: the first call also initializes
    calls, began = 1, time.perf_counter()
    while time.perf_counter() - began < warmup_s:
        calls = max(1, round(sample_s / sample(calls)))
    return statistics.median(sample(calls) for _ in range(samples))


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device)
