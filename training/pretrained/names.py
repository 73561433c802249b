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
# several names: their rows follow each other in ours
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
    start: int  # the first row in ours
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
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()}


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
        yield Piece(f"{name}.weight", f"{ours}.weight", 0, shape, transposed=is_linear)
        if ours not in ("embed", "positions"):
            yield Piece(f"{name}.bias", f"{ours}.bias", 0, shape[:1], is_zero=f"{ours}.bias" not in shapes)
    if HEAD_OURS in shapes:
        yield Piece(HEAD, HEAD_OURS, 0, shapes[HEAD_OURS])


def _decoder_pieces(model: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Iterator[Piece]:
    top = {"embed": ("embed_tokens",), "head.norm": ("norm",)}
    blocks = {
        f"blocks.{i}.{ours}": tuple(f"layers.{i}.{name}" for name in names)
        for i in range(model.n_layer)
        for ours, names in DECODER_BLOCK.items()
    }
    kv = model.n_kv_head * model.head_dim
    rows = {"attn.qkv": (model.attention_width, kv, kv), "ffn.up": (model.d_ff, model.d_ff)}
    for ours, names in (top | blocks).items():
        sizes = next((sizes for end, sizes in rows.items() if ours.endswith(end)), None)
        for kind in ("weight", "bias"):
            if (shape := shapes.get(f"{ours}.{kind}")) is None:
                continue
            start = 0
            for name, size in zip(names, sizes or shape[:1], strict=True):
                yield Piece(f"model.{name}.{kind}", f"{ours}.{kind}", start, (size, *shape[1:]))
                start += size
    if HEAD_OURS in shapes:
        yield Piece(HEAD, HEAD_OURS, 0, shapes[HEAD_OURS])
