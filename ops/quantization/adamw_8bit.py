"""AdamW with moments of 8 bits (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization").

A moment is stored as one byte an element, and a scale in fp32 for each block: the largest magnitude in it. A
byte is a place in a map of 256 numbers from -1 to 1 (the mean) or from 0 to 1 (the mean square), which are
denser towards 0: seven decades, each with twice as many numbers as the one below it (Dettmers 2016, "8-bit
approximations for parallelism in deep learning"). Each is rounded to the nearest. Codes and scales are those
of torchao 0.18's AdamW8bit, which is the oracle of the tests, and so are the numbers, but for one.

The trap is an outlier: a column whose gradients are 1,000 times its neighbors'. Their mean squares round to
code 0, their means do not, and m / (sqrt(0) + eps) is an update of thousands of learning rates. So code 0 of
the mean square stands for the least number above 0, which bounds m / sqrt(v), also after a checkpoint that
has such codes.

A block is 256 elements of one row; the last one of a row may be shorter. Ranks hold whole rows, so the blocks
are the same for any strategy and number of ranks. Where rows are multiples of 256, they are torchao's.
Vectors, and matrices of fewer than 4,096 elements, keep moments in fp32, as they do there.

The functions are the plain form of ops/triton_kernels/adamw_8bit.py, with the same bits.

R rows · C columns · B blocks of a row
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ops.quantization.random_bits import bf16_stochastically

BLOCK = 256  # elements that share a scale
SMALLEST = 4096  # elements of a matrix whose moments are quantized, at least
BYTES = 1 + 4 / BLOCK  # of an element
LEAST_SCALE = 1e-12  # of a block; torchao's, so that zeros can be divided by it
DECADES = 7
CHUNK = 2**22  # elements that the plain form updates at a time: its fp32 copies are some hundred MiB


class Scalars(NamedTuple):
    """What an update reads on the device, so that nothing waits and a capture follows changes: 0-d fp32."""

    rate: torch.Tensor
    grad_scale: torch.Tensor  # divides the gradient
    found_inf: torch.Tensor  # 1: nothing is written
    step: torch.Tensor  # the number of this update, for its random bits
    correction1: torch.Tensor  # 1 - beta1^step
    root2: torch.Tensor  # sqrt(1 - beta2^step)


class Moment(NamedTuple):
    """A quantized moment of a weight (R, C)."""

    codes: torch.Tensor  # uint8 (R, C)
    scales: torch.Tensor  # fp32 (R, B)


def is_quantized(shape: torch.Size) -> bool:
    """Whether a weight of this shape, the whole of it, has moments of 8 bits."""
    return len(shape) == 2 and shape.numel() >= SMALLEST


def scales_shape(shape: torch.Size) -> torch.Size:
    """Of a moment of a weight (R, C)."""
    rows, columns = shape
    return torch.Size((rows, -(-columns // BLOCK)))


def empty_moment(weight: torch.Tensor) -> Moment:
    """Of zeros: whatever the codes stand for, the scales are 0."""
    maps_on(weight.device)  # copied now: a capture must not
    scales = torch.zeros(scales_shape(weight.shape), device=weight.device)
    return Moment(torch.zeros_like(weight, dtype=torch.uint8), scales)


# --- the maps ---


@functools.cache
def number_map(signed: bool) -> torch.Tensor:
    """The 256 numbers, ascending, fp32 on the CPU: the middles of equal parts of each decade, 0, and 1."""
    numbers = [torch.tensor([0.0, 1.0], device="cpu")]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1, device="cpu")
        middles = 10 ** (decade - DECADES + 1) * (edges[:-1] + edges[1:]) / 2
        numbers += [middles, -middles] if signed else [middles]
    return torch.cat(numbers).sort().values


@functools.cache
def thresholds(signed: bool) -> torch.Tensor:
    """255 numbers, ascending: x is rounded to number i of the map if i of them are at most x.

    torchao rounds up if x - below, in fp32, is at least half of the gap. So each is the least fp32 number of
    which that is true, which is near the middle of the gap.
    """
    numbers = number_map(signed)
    below, above = numbers[:-1], numbers[1:]

    def goes_up(x: torch.Tensor) -> torch.Tensor:
        return x - below >= (above - below) * 0.5

    x = (below + above) / 2
    while (up := goes_up(before := torch.nextafter(x, below))).any():
        x = torch.where(up, before, x)
    while not (up := goes_up(x)).all():
        x = torch.where(up, x, torch.nextafter(x, above))
    return x


@functools.cache
def maps_on(device: torch.device) -> tuple[torch.Tensor, ...]:
    """What the codes of the mean stand for, and its thresholds, then those of the mean square, on this
    device."""
    squares = number_map(False).clone()
    squares[0] = squares[1]
    both = number_map(True), thresholds(True), squares, thresholds(False)
    return tuple(tensor.to(device) for tensor in both)


# --- quantizing ---


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """(R, C) -> (R, B, 256); what a row's last block lacks is 0."""
    return F.pad(x, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))


def quantize(x: torch.Tensor, signed: bool) -> Moment:
    """x, fp32 (R, C), as it is stored."""
    numbers = _blocks(x)
    scales = numbers.abs().amax(-1).clamp(min=LEAST_SCALE)
    limits = maps_on(x.device)[1 if signed else 3]
    codes = torch.bucketize(numbers / scales[..., None], limits, out_int32=True, right=True)
    return Moment(codes.flatten(1)[:, : x.shape[1]].to(torch.uint8), scales)


def dequantize(moment: Moment, signed: bool) -> torch.Tensor:
    """What is stored, fp32 (R, C)."""
    codes, scales = moment
    numbers = maps_on(codes.device)[0 if signed else 2][codes.int()]
    return (_blocks(numbers) * scales[..., None]).flatten(1)[:, : codes.shape[1]]


# --- the update ---


def plain_adamw_8bit(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    mean: Moment,
    square: Moment,
    copy: torch.Tensor | None,
    scalars: Scalars,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    rounding: tuple[torch.Tensor, int] | None = None,
) -> None:
    """AdamW's update of weight, mean and square in place, which also writes the weight to `copy`, if there is
    one. weight, gradient, copy (R, C) may be fp32 or bf16. rounding: as in ops/triton_kernels/adamw.py."""
    if not weight.numel():
        return  # this rank may have no row of a sharded matrix
    rows, columns = max(1, CHUNK // weight.shape[1]), weight.shape[1]
    if rounding is not None:
        key, start = rounding
        key = key.clone()
        key[1] = scalars.step
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        moments = Moment(*(t[part] for t in mean)), Moment(*(t[part] for t in square))
        w, m, v = _updated(weight[part], gradient[part], *moments, scalars, betas, eps, decay)
        if rounding is not None and weight.dtype == torch.bfloat16:
            w = bf16_stochastically(w, key, start=start + first * columns)
        kept = (weight[part], *moments[0], *moments[1])
        for old, new in zip(kept, (w, *quantize(m, True), *quantize(v, False)), strict=True):
            old.copy_(torch.where(scalars.found_inf == 0, new.to(old.dtype), old))
        if copy is not None:
            copy[part].copy_(torch.where(scalars.found_inf == 0, weight[part].to(copy.dtype), copy[part]))


def _updated(
    weight, gradient, mean: Moment, square: Moment, scalars: Scalars, betas, eps: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight, mean, square) in fp32, with one rounding for each operation."""
    w, m, v = weight.float(), dequantize(mean, True), dequantize(square, False)
    g = gradient.float() / scalars.grad_scale
    m = m + (1 - betas[0]) * (g - m)
    v = v + (1 - betas[1]) * (g * g - v)
    w = w - scalars.rate * decay * w
    root = v.double().sqrt().float()  # torch's own root of fp32 is not rounded to the nearest on a CPU
    return w - (scalars.rate / scalars.correction1) * m / (root / scalars.root2 + eps), m, v
