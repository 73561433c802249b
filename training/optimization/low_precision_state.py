"""What recipes of low precision keep from one micro-step to the next."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ops.float8 import FORWARD
from ops.quantization.delayed_scaling import update_all
from ops.quantization.random_bits import random_key
from ops.recipes.fp8_delayed import Scaling
from training.configuration.keys import TrainConfig

GRADIENT_DTYPES = {"e5m2": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}  # by fp8_gradients


class LowPrecisionState:
    """What low precision keeps from one micro-step to the next. It is on the device, where compiled code and
    captured graphs read it, and in every checkpoint. Most recipes keep nothing."""

    block_scaled = False  # whether tensor cores multiply mxfp8 or nvfp4
    check_failed: str | None = None  # why they do not, although this GPU has them

    def of_layer(self, i: int) -> Any:
        """The state of ops/quantized_linear.py's QuantizedLinear, of the i-th layer."""

    def before_iteration(self) -> None:
        pass

    def before_micro_step(self) -> None:
        pass

    def after_micro_step(self, loss: torch.Tensor, last: bool) -> torch.Tensor:
        """The loss, or nan if the backward overflowed where its gradients do not show it. last: of the
        iteration."""
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """By name, for a checkpoint."""
        return {}


class RandomBits(LowPrecisionState):
    """For which iteration and micro-step stochastic rounding draws its bits, so that a resumed run draws the
    same ones."""

    def __init__(self, layers: int, seed: int, device: torch.device):
        keys = [random_key(seed, tensor=i) for i in range(layers)]
        self.keys = torch.stack(keys).to(device)  # int64 (layers, 4), of ops/quantization/random_bits.py
        self.counter = torch.zeros(2, dtype=torch.int64, device=device)  # iteration, micro-step

    def of_layer(self, i: int) -> torch.Tensor:
        return self.keys[i]

    def before_micro_step(self) -> None:
        self.keys[:, 1:3] = self.counter

    def after_micro_step(self, loss: torch.Tensor, last: bool) -> torch.Tensor:
        self.counter[1] += 1
        if last:
            self.counter[0] += 1
            self.counter[1].zero_()  # = 0 would wait for the GPU
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        return {"counter": self.counter}


class DelayedScaling(LowPrecisionState):
    """Scales and largest magnitudes of every layer's x, w and dy: rows 0, 1 and 2. All processes have the
    same. Source: ops/quantization/delayed_scaling.py.

    inf and nan, which fp8 would hide by saturation, make the loss nan, so that the update is skipped; they do
    not enter the history, where inf would keep a scale as it is for as long as it is there."""

    def __init__(self, layers: int, config: TrainConfig, device: torch.device):
        numbers = 3 * layers
        self.algorithm = config.amax_algorithm
        self.scale, self.amax = (torch.zeros(numbers, device=device) for _ in range(2))  # 0: no history yet
        self.history = torch.zeros(config.amax_history, numbers, device=device)
        dtypes = FORWARD, FORWARD, GRADIENT_DTYPES[config.fp8_gradients]
        largest = torch.tensor([torch.finfo(dtype).max for dtype in dtypes], device=device)
        self.mapped_to = largest.repeat_interleave(layers)

    def of_layer(self, i: int) -> tuple[Scaling, Scaling, Scaling]:
        scales, amaxes = self.scale.view(3, -1)[:, i], self.amax.view(3, -1)[:, i]
        x, w, dy = (Scaling(*pair) for pair in zip(scales, amaxes, strict=True))
        return x, w, dy

    def before_iteration(self) -> None:
        """Forgets what an evaluation has found. Weights were quantized after the last update."""
        x, _, dy = self.amax.view(3, -1)
        x.zero_()
        dy.zero_()

    def after_micro_step(self, loss: torch.Tensor, last: bool) -> torch.Tensor:
        finite = self.amax.isfinite()
        self.amax.masked_fill_(~finite, math.inf)
        if dist.is_initialized():
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
            finite = self.amax.isfinite()
        self.amax.masked_fill_(~finite, 0.0)
        update_all(self.scale, self.history, self.amax, self.mapped_to, self.algorithm)
        return torch.where(finite.all(), loss, math.nan)

    def state(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "history": self.history}
