"""An optimizer that is driven by hand."""

import torch

from ops.quantization.adamw_8bit import Moment, scales_shape


def update(optimizer, rate: float = 3e-4, divisor: float = 1.0, found_inf: float = 0.0) -> None:
    """As training/optimization/step.py calls it."""
    device = optimizer.shards[0].local.device
    optimizer.step(*(torch.tensor(number, device=device) for number in (rate, divisor, found_inf)))


def empty_moment(weight: torch.Tensor) -> Moment:
    """Of zeros: whatever the codes stand for, the scales are 0."""
    scales = torch.zeros(scales_shape(weight.shape), device=weight.device)
    return Moment(torch.zeros_like(weight, dtype=torch.uint8), scales)
