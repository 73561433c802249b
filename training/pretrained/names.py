"""The one table of names: which tensor of Hugging Face's is which rows of which tensor of ours.

Rotary pairs need no permutation, because both split a head into halves. GPT-2's matrices (transformers'
Conv1D) are the transposes of ours, and its q, k and v are one matrix as ours are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import model_builder
from model_config import ModelConfig
from training.pretrained.architecture import family_of

HEAD, HEAD_OURS = "lm_head.weight", "head.lm_head.weight"
# values that a model computes by itself, which some files hold: rotary frequencies, causal masks
COMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")

# ours -> Hugging Face's names, whose rows follow each other in ours; those of gate_proj, up_proj take turns
GPT2 = {
    "embed": ("transformer.wte",),
    "positions": ("transformer.wpe",),
    "head.norm": ("transformer.ln_f",),
    "attn_norm": ("transformer.h.{}.ln_1",),
    "attn.qkv": ("transformer.h.{}.attn.c_attn",),
    "attn.out": ("transformer.h.{}.attn.c_proj",),
    "ffn_norm": ("transformer.h.{}.ln_2",),
    "ffn.up": ("transformer.h.{}.mlp.c_fc",),
    "ffn.down": ("transformer.h.{}.mlp.c_proj",),
}
DECODER = {
    "embed": ("model.embed_tokens",),
    "head.norm": ("model.norm",),
    "attn_norm": ("model.layers.{}.input_layernorm",),
    "attn.qkv": tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
    "attn.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "attn.k_norm": ("model.layers.{}.self_attn.k_norm",),
    "attn.out": ("model.layers.{}.self_attn.o_proj",),
    "ffn_norm": ("model.layers.{}.post_attention_layernorm",),
    "ffn.up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "ffn.down": ("model.layers.{}.mlp.down_proj",),
}
MATRICES = ("attn.qkv", "attn.out", "ffn.up", "ffn.down")  # of a block


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
    gpt2 = family_of(model) == "gpt2"
    table = GPT2 if gpt2 else DECODER
    places = [(ours, ours, names) for ours, names in table.items() if "{}" not in names[0]]
    for i in range(model.n_layer):
        in_block = {ours: names for ours, names in table.items() if "{}" in names[0]}
        places += [
            (ours, f"blocks.{i}.{ours}", tuple(name.format(i) for name in names))
            for ours, names in in_block.items()
        ]
    found = [piece for place in places for piece in _pieces(*place, model, shapes, gpt2)]
    if HEAD_OURS in shapes:
        found.append(Piece(HEAD, HEAD_OURS, range(shapes[HEAD_OURS][0]), shapes[HEAD_OURS]))
    return found


def _pieces(
    kind: str,
    ours: str,
    names: tuple[str, ...],
    model: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    gpt2: bool,
) -> Iterator[Piece]:
    """The weight of one module, and its bias. `kind`: the module's name in its block."""
    weight, bias = shapes.get(f"{ours}.weight"), shapes.get(f"{ours}.bias")
    if weight is None:  # a model without norms of q and k
        return
    is_zero = gpt2 and bias is None and kind not in ("embed", "positions")
    bias = weight[:1] if is_zero else bias
    rows = [every := range(weight[0])]
    if not gpt2 and kind == "attn.qkv":
        q, k = model.attention_width, model.attention_width + model.n_kv_head * model.head_dim
        rows = [every[:q], every[q:k], every[k:]]
    elif not gpt2 and kind == "ffn.up":
        rows = [every[::2], every[1::2]]
    for suffix, shape in (("weight", weight), ("bias", bias)):
        for name, mine in zip(names, rows, strict=True):
            if shape is None:
                continue
            transposed = gpt2 and suffix == "weight" and kind in MATRICES
            piece = Piece(f"{name}.{suffix}", f"{ours}.{suffix}", mine, (len(mine), *shape[1:]), transposed)
            yield piece._replace(is_zero=is_zero and suffix == "bias")


def without_prefix(found: list[Piece]) -> list[Piece]:
    """The same with the names in a file of the bare model."""
    return [
        piece._replace(name=piece.name.removeprefix("transformer.").removeprefix("model.")) for piece in found
    ]
