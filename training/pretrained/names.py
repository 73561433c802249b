"""The one table of names: which tensor of Hugging Face's is which rows of which tensor of ours.

Rotary pairs need no permutation, because both split a head into halves. GPT-2's matrices (transformers'
Conv1D) are the transposes of ours, and its q, k and v are one matrix as ours are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

import model_builder
from model_config import ModelConfig
from training.pretrained.architecture import family_of

HEAD, HEAD_OURS = "lm_head.weight", "head.lm_head.weight"
# values that a model computes by itself, which some files hold: rotary frequencies, causal masks
COMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")

GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
# several names: their rows follow each other in ours; those of gate_proj and up_proj take turns
DECODER_BLOCK = {
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn.up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
}


class Piece(NamedTuple):
    """A tensor of Hugging Face's, and its rows in a tensor of ours."""

    name: str  # Hugging Face's
    ours: str  # the name of a parameter
    rows: range  # in ours
    shape: tuple[int, ...]  # in ours; in the file the reverse if transposed
    transposed: bool = False
    is_zero: bool = False  # GPT-2 has a bias where the model has none: zeros are written, nothing is read

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


def pieces(model: ModelConfig) -> list[Piece]:
    """Every tensor of Hugging Face's model of this shape. Each row of each parameter is in one piece."""
    shapes = {name: tuple(p.shape) for name, p in model_builder.build_model(model).named_parameters()}
    make = _gpt2_pieces if family_of(model) == "gpt2" else _decoder_pieces
    return list(make(model, shapes))


def without_prefix(found: list[Piece]) -> list[Piece]:
    """The same with the names in a file of the bare model."""
    return [
        piece._replace(name=piece.name.removeprefix("transformer.").removeprefix("model.")) for piece in found
    ]


def gather(found: list[Piece], theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{our parameter: tensor} of Hugging Face's tensors: weights, or their gradients."""
    rows: dict[str, list[torch.Tensor]] = {}
    for piece in found:
        if not piece.is_zero:
            tensor = theirs[piece.name]
            rows.setdefault(piece.ours, []).append(tensor.t() if piece.transposed else tensor)
    pairs = in_pairs(found)
    return {
        name: torch.stack(parts, dim=1).flatten(0, 1) if name in pairs else torch.cat(parts)
        for name, parts in rows.items()
    }


def in_pairs(found: list[Piece]) -> set[str]:
    """The parameters of which every second row is of one of Hugging Face's tensors."""
    return {piece.ours for piece in found if piece.rows.step == 2}


def _gpt2_pieces(model: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Iterator[Piece]:
    top = {"embed": "wte", "positions": "wpe", "head.norm": "ln_f"}
    blocks = {
        f"blocks.{i}.{ours}": f"h.{i}.{name}"
        for i in range(model.n_layer)
        for ours, name in GPT2_BLOCK.items()
    }
    for ours, name in (top | blocks).items():
        name, shape = f"transformer.{name}", shapes[f"{ours}.weight"]
        is_linear = ours.endswith((".qkv", ".out", ".up", ".down"))
        yield Piece(f"{name}.weight", f"{ours}.weight", range(shape[0]), shape, transposed=is_linear)
        if ours not in ("embed", "positions"):
            is_zero = f"{ours}.bias" not in shapes
            yield Piece(f"{name}.bias", f"{ours}.bias", range(shape[0]), shape[:1], is_zero=is_zero)
    if HEAD_OURS in shapes:
        yield Piece(HEAD, HEAD_OURS, range(shapes[HEAD_OURS][0]), shapes[HEAD_OURS])


def _decoder_pieces(model: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Iterator[Piece]:
    top = {"embed": ("embed_tokens",), "head.norm": ("norm",)}
    blocks = {
        f"blocks.{i}.{ours}": tuple(f"layers.{i}.{name}" for name in names)
        for i in range(model.n_layer)
        for ours, names in DECODER_BLOCK.items()
    }
    q = model.attention_width
    k = q + model.n_kv_head * model.head_dim
    for ours, names in (top | blocks).items():
        for kind in ("weight", "bias"):
            if (shape := shapes.get(f"{ours}.{kind}")) is None:
                continue
            rows = [every := range(shape[0])]
            if ours.endswith("attn.qkv"):
                rows = [every[:q], every[q:k], every[k:]]
            elif ours.endswith("ffn.up"):
                rows = [every[::2], every[1::2]]
            for name, mine in zip(names, rows, strict=True):
                yield Piece(f"model.{name}.{kind}", f"{ours}.{kind}", mine, (len(mine), *shape[1:]))
    if HEAD_OURS in shapes:
        yield Piece(HEAD, HEAD_OURS, range(shapes[HEAD_OURS][0]), shapes[HEAD_OURS])
