"""AdamW's update of one tensor in plain PyTorch: Kingma and Ba 2015, alg. 1, with the weight decay of
Loshchilov and Hutter 2019, alg. 2. Weight, gradient and moments each have a dtype of their own.

A CPU runs it where something is stored in less than fp32. Every operation is elementwise, so a tensor may be
divided in any way. With moments of 8 bits, it has the bits of ops/triton_kernels/adamw_8bit.py. Else it has
those of torch's fused kernel on a CPU, which rounds a product and its sum once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ops.quantization.adamw_8bit import Moment, dequantize, quantize
from ops.quantization.random_bits import bf16_stochastically

CHUNK = 2**22  # elements that are updated at a time: their fp32 copies are some hundred MiB


class Scalars(NamedTuple):
    """What an update reads on the device, so that nothing waits and a capture follows changes: 0-d fp32."""

    rate: torch.Tensor
    grad_scale: torch.Tensor  # divides the gradient
    found_inf: torch.Tensor  # 1: nothing is written
    step: torch.Tensor  # the number of this update, for its random bits
    correction1: torch.Tensor  # 1 - beta1^step
    root2: torch.Tensor  # sqrt(1 - beta2^step)


def plain_adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor | Moment,
    square: torch.Tensor | Moment,
    copy: torch.Tensor | None,
    scalars: Scalars,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    rounding: tuple[torch.Tensor, int] | None = None,
) -> None:
    """Updates weight, mean and square in place, and writes the weight to `copy`, if there is one. With
    moments of 8 bits, all are (R, C). rounding: as in ops/triton_kernels/adamw.py."""
    if not weight.numel():
        return  # this rank may have no row of a sharded matrix
    if isinstance(mean, Moment):
        kept, update = [weight, *mean, *square], _updated_8_bit
    else:
        assert not isinstance(square, Moment)
        kept, update = [tensor.view(-1) for tensor in (weight, mean, square)], _updated
    gradient, width = gradient.view_as(kept[0]), kept[0].shape[1:].numel()
    rows = max(1, CHUNK // width)
    for first in range(0, len(gradient), rows):
        part = slice(first, first + rows)
        olds = [tensor[part] for tensor in kept]
        news = update(gradient[part].float() / scalars.grad_scale, olds, scalars, betas, eps, decay)
        for stream, (old, new) in enumerate(zip(olds, news, strict=True)):
            if rounding is not None and old.dtype == torch.bfloat16:
                key, start = rounding
                key[1].copy_(scalars.step)
                new = bf16_stochastically(new, key, stream=stream, start=start + first * width)
            old.copy_(torch.where(scalars.found_inf == 0, new.to(old.dtype), old))
    if copy is not None:
        copy.copy_(torch.where(scalars.found_inf == 0, weight.to(copy.dtype), copy))


def _updated(
    g, olds: list[torch.Tensor], scalars: Scalars, betas, eps: float, decay: float
) -> tuple[torch.Tensor, ...]:
    """(weight, mean, square) in fp32. What does not depend on the element is computed in fp64."""
    w, m, v = (tensor.float() for tensor in olds)
    rest1, rest2 = (torch.tensor(1 - beta, dtype=torch.float32, device=w.device) for beta in betas)
    m = _multiply_add(rest1, g - m, m)
    v = _multiply_add(rest2 * g, g, v * betas[1])
    w = w * (1 - scalars.rate.double() * decay).float()
    step_size = (scalars.rate.double() / (1 - betas[0] ** scalars.step.double())).float()
    return w - _direction(step_size, m, v, scalars, eps), m, v


def _updated_8_bit(
    g, olds: list[torch.Tensor], scalars: Scalars, betas, eps: float, decay: float
) -> tuple[torch.Tensor, ...]:
    """(weight in fp32, codes and scales of the mean, those of the square), with one rounding for each
    operation."""
    w, m, v = olds[0].float(), dequantize(Moment(*olds[1:3]), True), dequantize(Moment(*olds[3:]), False)
    m = m + (1 - betas[0]) * (g - m)
    v = v + (1 - betas[1]) * (g * g - v)
    w = w - scalars.rate * decay * w
    w = w - _direction(scalars.rate / scalars.correction1, m, v, scalars, eps)
    return w, *quantize(m, True), *quantize(v, False)


def _direction(step_size, m, v, scalars: Scalars, eps: float) -> torch.Tensor:
    root = v.double().sqrt().float()  # torch's own root of fp32 is not rounded to the nearest on a CPU
    return step_size * m / (root / scalars.root2 + eps)


def _multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a b + c, rounded once: in fp64, a product of two numbers in fp32 is exact."""
    return (a.double() * b.double() + c.double()).float()
