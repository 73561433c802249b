"""AdamW over this rank's shards, fused into one pass. Loshchilov and Hutter 2019.

adam_dtype='bfloat16' stores the moments in 2 bytes, '8bit' in 1 (ops/quantization/adamw_8bit.py),
param_dtype='bfloat16' the weights in 2; the arithmetic stays fp32. Three classes make the same update, with
the same state in checkpoints:

    OnePassAdamW        on a GPU, in any of these dtypes; also writes the working copies of the weights
    torch.optim.AdamW   on a CPU, all in fp32
    MixedAdamW          on a CPU, with something in less

Why a GPU has its own: bytes that an iteration moves per parameter after its backward (fp32, computing in
bf16). Measured for 1.83e9 parameters on an H200: 26.7 ms before, 16.7 ms the sum of the same parts now.

                    gradient norm   update   working copy   zeroing gradients   sum
    torch's fused   4               32       6              4                   46
    OnePassAdamW    4               30       in the update  4                   38

weight_rounding='stochastic' rounds what is stored in bf16 up or down at random, so that it is right on
average: to nearest, an update below 2^-9 of a weight is lost. The random bits are a function of the seed, the
weight, its count of updates, and the element's index in the whole weight. So every strategy and number of
ranks makes the same weights, replicas stay equal, and a resume needs only the counts, which a checkpoint has.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from common.errors import UserError
from ops.quantization.adamw_8bit import Moment, Scalars, empty_moment, is_quantized, plain_adamw_8bit
from ops.quantization.random_bits import bf16_stochastically, weight_key
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.configuration.seeds import WEIGHT_ROUNDING, stream_seed
from training.strategies.strategy import Shard

CHUNK = 2**22  # elements that MixedAdamW updates at a time: its fp32 copies are at most 64 MiB
VECTOR = 64  # elements: the most that torch's kernel on a CPU takes at once


class Rounding(NamedTuple):
    """How a weight and its moments are rounded to bf16 stochastically (ops/quantization/random_bits.py)."""

    key: torch.Tensor  # of this weight; its iteration is the weight's step
    start: int  # index of the shard's first element in the whole weight


Roundings = dict[nn.Parameter, Rounding]  # empty: to nearest


class OnePassAdamW(torch.optim.AdamW):
    """AdamW on a GPU, one kernel for each tensor (ops/triton_kernels/adamw.py): it updates the weight and its
    moments, and writes the weight's working copy, so that publish() need not.

    As torch's capturable AdamW it reads rate, step, grad_scale and found_inf on the device. Unlike torch's
    fused one, it does not write the scaled gradient back. found_inf = 1 leaves every bit as it is, also the
    steps and the working copies.
    """

    writes_copies = True

    def __init__(
        self,
        groups: list[dict],
        copies: dict[nn.Parameter, torch.Tensor | None],
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        roundings: Roundings | None = None,
    ):
        """copies: the working copy of each weight; None where there is none."""
        super().__init__(groups, lr=lr, betas=betas)
        self.copies, self.roundings = copies, roundings or {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without a closure
        from ops.triton_kernels.adamw import triton_adamw

        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            rate, scale, found_inf = on_device(self, group, weights[0].device)
            steps = [self.state[weight]["step"] for weight in weights]
            torch._foreach_add_(steps, [1 - found_inf] * len(steps))  # a list, or the host would read it
            corrections = _bias_corrections(torch.stack(steps), group["betas"])
            for weight, step, *correction in zip(weights, steps, *corrections, strict=True):
                mean, square = _moments(self.state[weight])
                kernel: Callable[..., None] = triton_adamw
                if isinstance(mean, Moment):
                    from ops.triton_kernels.adamw_8bit import triton_adamw_8bit as kernel
                kernel(
                    weight,
                    weight.grad,
                    mean,
                    square,
                    self.copies[weight],
                    Scalars(rate, scale, found_inf, step, *correction),
                    group["betas"],
                    group["eps"],
                    group["weight_decay"],
                    self.roundings.get(weight),
                )


def _moments(state: dict[str, torch.Tensor]) -> tuple[Moment, Moment] | tuple[torch.Tensor, torch.Tensor]:
    """Both moments of a weight: of 8 bits, or tensors."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    if "exp_avg_scale" not in state:
        return mean, square
    return Moment(mean, state["exp_avg_scale"]), Moment(square, state["exp_avg_sq_scale"])


def on_device(
    optimizer: torch.optim.Optimizer, group: dict, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rate, divisor of the gradients, and whether they are not finite, each a 0-d tensor."""
    values = group["lr"], getattr(optimizer, "grad_scale", 1.0), getattr(optimizer, "found_inf", 0.0)
    rate, scale, found_inf = (
        value if isinstance(value, torch.Tensor) else torch.full((), value, device=device) for value in values
    )
    return rate, scale, found_inf


def _bias_corrections(
    steps: torch.Tensor, betas: tuple[float, float]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """1 - beta1^step and sqrt(1 - beta2^step), one for each step (n,). In fp64, as torch's fused kernel: at
    beta 0.999, fp32 would be 6e-5 off in the first step."""
    first, second = (1 - beta ** steps.double() for beta in betas)
    return first.float().unbind(), second.sqrt().float().unbind()


class MixedAdamW(torch.optim.AdamW):
    """AdamW on a CPU whose weights and moments may be bf16, each with a dtype of its own.

    torch's fused kernel wants one dtype for all. So it gets fp32 copies of one chunk of a tensor at a time,
    which are then rounded. Trap: rounding to nearest loses a change of less than 2^-8 of a moment, and a
    moment decays by 1 - beta an iteration; so training/configuration/rules.py refuses betas above 0.99, which
    stochastic rounding allows. No value is read by the host, so nothing waits for the device. found_inf = 1
    leaves every bit as it is: a value that the kernel does not change rounds to itself in both ways.
    """

    def __init__(
        self,
        groups: list[dict],
        lr: float | torch.Tensor,
        betas: tuple[float, float],
        roundings: Roundings | None = None,
    ):
        super().__init__(groups, lr=lr, betas=betas, fused=True)
        self.roundings = roundings or {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without a closure
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            steps = [self.state[weight]["step"] for weight in weights]
            torch._foreach_add_(steps, 1)
            for weight, step in zip(weights, steps, strict=True):
                if "exp_avg_scale" in self.state[weight]:
                    self._update_8_bit(weight, step, group)
                else:
                    self._update_in_chunks(weight, step, group, scale, overflow)
            if overflow is not None:
                torch._foreach_sub_(steps, [overflow] * len(steps))

    def _update_in_chunks(self, weight, step, group: dict, scale, overflow) -> None:
        state, rounding = self.state[weight], self.roundings.get(weight)
        if rounding is not None:
            rounding.key[1].copy_(step)
        whole = (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"])
        chunks = (tensor.view(-1).split(CHUNK) for tensor in whole)
        for i, (chunk, gradient, mean, square) in enumerate(zip(*chunks, strict=True)):
            of_chunk = rounding and rounding._replace(start=rounding.start + i * CHUNK)
            _update(chunk, gradient, mean, square, step, group, scale, overflow, of_chunk)

    def _update_8_bit(self, weight, step, group: dict) -> None:
        mean, square = _moments(self.state[weight])
        assert isinstance(mean, Moment) and isinstance(square, Moment)
        (first,), (second,) = _bias_corrections(step[None], group["betas"])
        rate, scale, found_inf = on_device(self, group, weight.device)
        plain_adamw_8bit(
            weight,
            weight.grad,
            mean,
            square,
            None,
            Scalars(rate, scale, found_inf, step, first, second),
            group["betas"],
            group["eps"],
            group["weight_decay"],
            self.roundings.get(weight),
        )


def _update(
    weight, gradient, mean, square, step, group: dict, grad_scale, found_inf, rounding: Rounding | None
) -> None:
    """AdamW's update of weight, mean and square in place; all four (n,), each in a dtype of its own."""
    if not len(weight):
        return  # this rank may have no row of a sharded matrix
    # whole vectors: torch's kernel rounds what is left after them in another way, and ranks divide elsewhere
    wide = [F.pad(t.float(), (0, -len(t) % VECTOR)) for t in (weight, gradient, mean, square)]
    wide_weight, wide_gradient, wide_mean, wide_square = wide
    torch._fused_adamw_(
        [wide_weight],
        [wide_gradient],
        [wide_mean],
        [wide_square],
        [],
        [step],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    pairs = ((weight, wide_weight), (mean, wide_mean), (square, wide_square))
    for stream, (stored, padded) in enumerate(pairs):
        new = padded[: len(stored)]
        if rounding is not None and stored.dtype == torch.bfloat16:
            new = bf16_stochastically(new, rounding.key, stream=stream, start=rounding.start)
        stored.copy_(new)  # if it is fp32 and was not padded, both are one tensor, and nothing is copied


def build_adamw(
    shards: list[Shard], config: TrainConfig, roundings: Roundings | None = None
) -> torch.optim.AdamW:
    """AdamW with weight decay only on matrices (embeddings too). Its state is allocated here, so that a
    checkpoint can be loaded into it and an out-of-memory error comes before the first step."""
    groups = [
        {"params": [s.local for s in shards if s.is_matrix], "weight_decay": config.weight_decay},
        {"params": [s.local for s in shards if not s.is_matrix], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = _choose(groups, shards, config, roundings)
    for shard in shards:
        step = torch.zeros((), dtype=torch.float32, device=shard.local.device)
        optimizer.state[shard.local] = {"step": step, **_first_moments(shard, config.adam_dtype)}
    return optimizer


def _first_moments(shard: Shard, dtype: str) -> dict[str, torch.Tensor]:
    if dtype == "8bit" and is_quantized(shard.parameter.shape):
        pairs = {name: empty_moment(shard.local) for name in ("exp_avg", "exp_avg_sq")}
        return {name: pair.codes for name, pair in pairs.items()} | {
            f"{name}_scale": pair.scales for name, pair in pairs.items()
        }
    stored = DTYPES["float32" if dtype == "8bit" else dtype]
    return {name: torch.zeros_like(shard.local, dtype=stored) for name in ("exp_avg", "exp_avg_sq")}


NAMES = {  # in the start-up report
    OnePassAdamW: "AdamW (one pass, Triton)",
    torch.optim.AdamW: "AdamW (fused)",
    MixedAdamW: "AdamW (on float32 copies)",
}


def adamw_class(config: TrainConfig, on_gpu: bool) -> type[torch.optim.AdamW]:
    if on_gpu:
        return OnePassAdamW
    return torch.optim.AdamW if config.adam_dtype == config.param_dtype == "float32" else MixedAdamW


def _choose(
    groups: list[dict], shards: list[Shard], config: TrainConfig, roundings: Roundings | None
) -> torch.optim.AdamW:
    rate, betas = config.learning_rate, (config.beta1, config.beta2)
    kind = adamw_class(config, shards[0].local.is_cuda)
    if kind is OnePassAdamW:
        if importlib.util.find_spec("triton") is None:
            raise UserError(
                "device='cuda' needs Triton, which computes AdamW's update and other operations, but it is "
                "not installed; torch's CUDA wheels bring it along, so reinstall torch with them"
            )
        copies = {shard.local: shard.working_copy for shard in shards}
        return OnePassAdamW(groups, copies, rate, betas, roundings)
    if kind is MixedAdamW:
        return MixedAdamW(groups, rate, betas, roundings)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)


def make_roundings(shards: list[Shard], config: TrainConfig) -> Roundings:
    """Of all weights of the model; none if they are rounded to nearest. A weight's number is its place in the
    model, since every strategy has its shards in that order."""
    if config.weight_rounding != "stochastic":
        return {}
    seed = stream_seed(config.seed, WEIGHT_ROUNDING) >> 1  # 63 bits
    return {
        shard.local: Rounding(weight_key(seed, number, shard.local.device), shard.start)
        for number, shard in enumerate(shards)
    }
