"""Families of models for tools.plan: a shape for each width, and for any number of parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from common.errors import UserError
from mfu_versions import model_builder_v3 as v3
from model_config import MOST, ModelConfig, model_config

WIDTHS = (*range(128, 2048, 128), *range(2048, 8192 + 1, 256))
BLOCK_SIZE = 2048  # tokens; of every shipped configuration


class Family(NamedTuple):
    """Depth and feed-forward width are in proportion to the width, as in the shipped configuration."""

    shipped: str
    layers_per_1024: Fraction  # layers for each 1,024 columns of width
    d_ff_per_width: Fraction  # d_ff is rounded up to a multiple of 128
    heads_per_kv_head: int


FAMILIES = {
    "qwen3": Family("full_qwen3_1.8b_optimal.py", Fraction(12), Fraction(3), 2),
    "llama3": Family("full_llama3_1.5b_optimal.py", Fraction(9), Fraction(7, 2), 2),
    "llama": Family("full_llama_1.36b.py", Fraction(8), Fraction(8, 3), 1),
    "gpt2": Family("full_gpt2_1.36b.py", Fraction(8), Fraction(4), 1),
}


@functools.cache
def parameters(model: ModelConfig) -> int:
    """All of them, embeddings included. Layers are alike, so two small models tell."""
    one, two = (v3.build_model(replace(model, n_layer=n)).count_parameters()["total"] for n in (1, 2))
    return one + (model.n_layer - 1) * (two - one)


def models_of(arch: str, vocab_size: int | None = None, block_size: int = BLOCK_SIZE) -> list[ModelConfig]:
    """The model of each width, the smallest first."""
    family, models = FAMILIES[arch], []
    for width in WIDTHS:
        n_head = width // (64 if width < 2048 else 128)
        shape = {
            "n_layer": max(round(family.layers_per_1024 * width / 1024), 1),
            "n_head": n_head,
            "n_kv_head": n_head // family.heads_per_kv_head,
            "n_embd": width,
            "d_ff": math.ceil(family.d_ff_per_width * width / 128) * 128,
        }
        models.append(model_config(arch, vocab_size=vocab_size, block_size=block_size, **shape))
    return models


def nearest(models: Sequence[ModelConfig], size: float) -> ModelConfig:
    return min(models, key=lambda model: abs(math.log(parameters(model) / size)))


def model_for(
    arch: str, size: float, vocab_size: int | None = None, block_size: int = BLOCK_SIZE
) -> ModelConfig:
    """About `size` parameters: the width whose model comes nearest, with as many layers as the size needs.
    Raises UserError."""
    models = models_of(arch, vocab_size, block_size)
    least, most = parameters(models[0]), parameters(models[-1])
    if not least / 2 <= size <= 2 * most:
        raise UserError(
            f"the {arch} family has shapes of {least:,} to {most:,} parameters, got a size of {size:.4g}"
            + ("; a smaller --vocab_size makes smaller models" if size < least else "")
        )
    model = nearest(models, size)
    one, two = (parameters(replace(model, n_layer=n)) for n in (1, 2))
    return replace(model, n_layer=min(max(1 + round((size - one) / (two - one)), 1), MOST["n_layer"]))
