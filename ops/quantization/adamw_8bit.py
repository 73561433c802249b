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

ops/quantization/adamw.py has the update.

R rows · C columns · B blocks of a row
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK = 256  # elements that share a scale
SMALLEST = 4096  # elements of a matrix whose moments are quantized, at least
LEAST_SCALE = 1e-12  # of a block; torchao's, so that zeros can be divided by it
DECADES = 7


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
