"""AdamW (Loshchilov and Hutter 2019), each tensor in one pass.

adam_dtype='bfloat16' stores the moments in 2 bytes, '8bit' in 1 (ops/quantization/adamw_8bit.py),
param_dtype='bfloat16' the weights in 2; the arithmetic stays fp32. A GPU has Triton kernels, which also write
the working copies of the weights; a CPU has torch's fused kernel where all is fp32, else the plain form.

Why a GPU has its own: bytes that an iteration moves per parameter after its backward (fp32, computing in
bf16). Measured for 1.83e9 parameters on an H200: 26.7 ms before, 16.7 ms the sum of the same parts now.

                    gradient norm   update   working copy   zeroing gradients   sum
    torch's fused   4               32       6              4                   46
    one pass        4               30       in the update  4                   38

Trap: rounding to nearest loses a change of less than 2^-8 of a moment in bf16, and a moment decays by
1 - beta an iteration; so training/configuration/rules.py refuses betas above 0.99, which stochastic rounding
allows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from ops.quantization.adamw import Scalars, plain_adamw
from ops.quantization.adamw_8bit import Moment, is_quantized, maps_on, scales_shape
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.optimization.optimizer import Kept, Optimizer
from training.strategies.strategy import Shard

EPS = 1e-8
MOMENTS = ("exp_avg", "exp_avg_sq")
# in the start-up report
ONE_PASS, FUSED, PLAIN = "AdamW (one pass, Triton)", "AdamW (fused)", "AdamW (on float32 copies)"


class AdamW(Optimizer):
    """Keeps of a weight its step, and both moments, with a scale for each block if they have 8 bits."""

    settings: tuple[str, ...] = ("adam_dtype",)
    unconverted = {"adam_dtype": ("8bit",)}
    smaller = {"adam_dtype": "bfloat16"}, {"adam_dtype": "8bit"}

    @classmethod
    def keeps(cls, name: str, shape: torch.Size, config: TrainConfig) -> dict[str, Kept]:
        item, fp32 = f"Adam moments ({config.adam_dtype})", torch.float32
        kept = {"step": Kept(item, (), fp32)}
        if config.adam_dtype == "8bit" and is_quantized(shape):
            kept |= {moment: Kept(item, shape, torch.uint8) for moment in MOMENTS}
            return kept | {f"{moment}_scale": Kept(item, scales_shape(shape), fp32) for moment in MOMENTS}
        stored = fp32 if config.adam_dtype == "8bit" else DTYPES[config.adam_dtype]
        return kept | {moment: Kept(item, shape, stored) for moment in MOMENTS}

    @classmethod
    def describe(cls, weights: dict[str, torch.Tensor], config: TrainConfig) -> dict[str, Any]:
        kind = ONE_PASS if config.device == "cuda" else FUSED if _is_fp32(config) else PLAIN
        return super().describe(weights, config) | {"type": kind, "moments": config.adam_dtype}

    @classmethod
    def line(cls, config: TrainConfig) -> str:
        return f"betas {config.beta1:g} {config.beta2:g}"

    @classmethod
    def warnings(cls, config: TrainConfig) -> list[str]:
        beta1, beta2 = config.beta1, config.beta2
        text = (
            f"beta2={beta2:g} is not above beta1^2={beta1**2:.4g}: updates have no bound (Reddi et al. 2018, "
            "theorem 4), and the loss may rise; raise beta2, 0.95 is usual"
        )
        return [text] * (0 < beta1 and beta2 <= beta1**2) + super().warnings(config)

    def __init__(self, shards: list[Shard], config: TrainConfig, row_group: dist.ProcessGroup | None = None):
        super().__init__(shards, config, row_group)
        self.betas = config.beta1, config.beta2
        self.on_gpu = self.writes_copies = self.shards[0].local.is_cuda
        if self.on_gpu and importlib.util.find_spec("triton") is None:
            raise UserError(
                "device='cuda' needs Triton, which computes AdamW's update and other operations, but it is "
                "not installed; torch's CUDA wheels bring it along, so reinstall torch with them"
            )
        if config.adam_dtype == "8bit":
            maps_on(self.shards[0].local.device)  # copied now: a capture must not

    @torch.no_grad()
    def step(self, rate: torch.Tensor, divisor: torch.Tensor, found_inf: torch.Tensor) -> None:
        steps = self.count(self.shards, found_inf)
        corrections = _bias_corrections(torch.stack(steps), self.betas)
        for shard, step, *correction in zip(self.shards, steps, *corrections, strict=True):
            mean, square = _moments(self.kept(shard))
            copy = shard.working_copy if self.writes_copies else None
            scalars = Scalars(rate, divisor, found_inf, step, *correction)
            numbers = self.betas, EPS, self.decay(shard), self.roundings.get(shard.name)
            self._form(mean)(shard.local, shard.grad, mean, square, copy, scalars, *numbers)

    def _form(self, mean: torch.Tensor | Moment) -> Callable[..., None]:
        if not self.on_gpu:
            return fused_adamw if _is_fp32(self.config) else plain_adamw
        if isinstance(mean, Moment):
            from ops.triton_kernels.adamw_8bit import triton_adamw_8bit

            return triton_adamw_8bit
        from ops.triton_kernels.adamw import triton_adamw

        return triton_adamw


OPTIMIZER = AdamW


def _is_fp32(config: TrainConfig) -> bool:
    return config.adam_dtype == config.param_dtype == "float32"


def _moments(kept: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | tuple[Moment, Moment]:
    mean, square = (kept[moment] for moment in MOMENTS)
    if "exp_avg_scale" not in kept:
        return mean, square
    return Moment(mean, kept["exp_avg_scale"]), Moment(square, kept["exp_avg_sq_scale"])


def _bias_corrections(
    steps: torch.Tensor, betas: tuple[float, float]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """1 - beta1^step and sqrt(1 - beta2^step), one for each step (n,). In fp64, as torch's fused kernel: at
    beta 0.999, fp32 would be 6e-5 off in the first step."""
    first, second = (1 - beta ** steps.double() for beta in betas)
    return first.float().unbind(), second.sqrt().float().unbind()


def fused_adamw(weight, gradient, mean, square, copy, scalars: Scalars, betas, eps, decay, rounding) -> None:
    """torch's own kernel, on a CPU with everything in fp32. It also divides the gradient in place."""
    assert copy is rounding is None
    torch._fused_adamw_(
        [weight], [gradient], [mean], [square], [], [scalars.step], lr=scalars.rate, beta1=betas[0],
        beta2=betas[1], weight_decay=decay, eps=eps, amsgrad=False, maximize=False,
        grad_scale=scalars.grad_scale, found_inf=scalars.found_inf,
    )  # fmt: skip
