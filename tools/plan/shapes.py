"""Families of model shapes: a shape for each width or for a wanted size, its parameters, its FLOPs by v3.

The depth and the feed-forward width of a family are in proportion to the width, as those of its shipped
configuration (config/full_*.py). Widths are multiples of 128 up to 2,048, then of 256; d_ff is rounded up to
a multiple of 128; heads have 64 columns below a width of 2,048, and 128 from there on.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from common.errors import UserError
from mfu_versions import model_builder_v3 as v3
from model_config import MOST, ModelConfig, model_config

WIDTHS = (*range(128, 2048, 128), *range(2048, 8192 + 1, 256))
BLOCK_SIZE = 2048  # tokens; of every shipped configuration


class Family(NamedTuple):
    shipped: str  # the configuration whose proportions it has
    layers_per_1024: Fraction  # layers for each 1,024 columns of width
    d_ff_per_width: Fraction
    heads_per_kv_head: int


FAMILIES = {
    "qwen3": Family("full_qwen3_1.8b_optimal.py", Fraction(12), Fraction(3), 2),
    "llama3": Family("full_llama3_1.5b_optimal.py", Fraction(9), Fraction(7, 2), 2),
    "llama": Family("full_llama_1.36b.py", Fraction(8), Fraction(8, 3), 1),
    "gpt2": Family("full_gpt2_1.36b.py", Fraction(8), Fraction(4), 1),
}


@dataclass(frozen=True)
class Shape:
    """A model, as far as a plan needs it."""

    model: ModelConfig
    parameters: int  # all of them, embeddings included

    @property
    def flops_per_token(self) -> int:
        """Training, by v3, with the full score matrix."""
        return v3.count_flops(self.model, self.model.block_size)["flops_per_token"]

    def __str__(self) -> str:
        m = self.model
        return f"{m.n_layer}-{m.n_head}-{m.n_embd}-{m.d_ff}, {m.n_kv_head}"


def shape_of(model: ModelConfig) -> Shape:
    return Shape(model, v3.build_model(model).count_parameters()["total"])


@functools.cache
def shapes_of(arch: str, vocab_size: int | None = None, block_size: int = BLOCK_SIZE) -> tuple[Shape, ...]:
    """The shape of each width, the smallest first."""
    layers = FAMILIES[arch].layers_per_1024
    return tuple(
        _shape(arch, width, max(round(layers * width / 1024), 1), vocab_size, block_size) for width in WIDTHS
    )


def shape_for(arch: str, size: float, vocab_size: int | None = None, block_size: int = BLOCK_SIZE) -> Shape:
    """The shape of a family with about `size` parameters: the width whose shape comes nearest, with as many
    layers as the size needs. Raises UserError."""
    shapes = shapes_of(arch, vocab_size, block_size)
    least, most = shapes[0].parameters, shapes[-1].parameters
    if not least / 2 <= size <= 2 * most:
        raise UserError(
            f"the {arch} family has shapes of {least:,} to {most:,} parameters, got a size of {size:.4g}"
            + ("; a smaller --vocab_size makes smaller models" if size < least else "")
        )
    width = nearest(shapes, size).model.n_embd
    base, layer = _parameters(arch, width, vocab_size, block_size)
    n_layer = min(max(round((size - base) / layer), 1), MOST["n_layer"])
    return _shape(arch, width, n_layer, vocab_size, block_size)


def nearest(shapes: tuple[Shape, ...], size: float) -> Shape:
    return min(shapes, key=lambda shape: abs(math.log(shape.parameters / size)))


@functools.cache
def _parameters(arch: str, width: int, vocab_size: int | None, block_size: int) -> tuple[int, int]:
    """(parameters without layers, parameters of a layer): all layers are alike."""
    one, two = (
        shape_of(_model(arch, width, n_layer, vocab_size, block_size)).parameters for n_layer in (1, 2)
    )
    return 2 * one - two, two - one


def _shape(arch: str, width: int, n_layer: int, vocab_size: int | None, block_size: int) -> Shape:
    base, layer = _parameters(arch, width, vocab_size, block_size)
    return Shape(_model(arch, width, n_layer, vocab_size, block_size), base + n_layer * layer)


def _model(arch: str, width: int, n_layer: int, vocab_size: int | None, block_size: int) -> ModelConfig:
    family = FAMILIES[arch]
    n_head = width // (64 if width < 2048 else 128)
    return model_config(
        arch,
        n_layer=n_layer,
        n_head=n_head,
        n_kv_head=n_head // family.heads_per_kv_head,
        n_embd=width,
        d_ff=math.ceil(family.d_ff_per_width * width / 128) * 128,
        vocab_size=vocab_size,
        block_size=block_size,
    )
