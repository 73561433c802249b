"""Translates Hugging Face's config.json to a model's keys: a family is a class, whose fields are those of its
config.json that are read. writing.py goes the other way.

Both spellings of config.json are read: transformers 4 writes rope_theta, rope_scaling and torch_dtype,
transformers 5 writes rope_parameters and dtype. What the model cannot compute is refused by its name in
config.json: weights that fit would otherwise give wrong logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import rope_scaling
from common.errors import UserError
from common.schema import LARGEST, Check, Positive, parse
from common.text import shown
from model_config import ModelConfig

LLAMA3_IDS = 128_256
Number = Annotated[float, Check("a number above 0", lambda number: 0 < number < LARGEST)]


@dataclass(frozen=True, kw_only=True)
class Gpt2:
    """Null, or a field that is not there, is transformers' default. A Literal is all that can be computed."""

    model_class = "GPT2LMHeadModel"
    presets: ClassVar[tuple[str, ...]] = ("gpt2",)  # values of arch_preset that are such models
    # keys of the model, whatever config.json says
    style: ClassVar[dict[str, Any]] = {
        **dict(normalization="layernorm", activation="gelu", position_encoding="learned", ffn_type="mlp"),
        **dict(bias=True, qkv_bias=False, qk_norm=False),
    }
    sizes = dict(n_layer="n_layer", n_head="n_head", n_embd="n_embd")  # key -> its name in config.json

    vocab_size: Positive
    n_layer: Positive
    n_head: Positive
    n_embd: Positive
    n_positions: Positive
    n_inner: Positive | None = None
    layer_norm_epsilon: Number | None = None
    tie_word_embeddings: bool | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu_fast"] = "gelu_new"  # the tanh form
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    is_causal: Literal[True] = True

    def keys(self) -> dict[str, Any]:
        return {
            "num_key_value_heads": self.n_head,
            "head_dim": self.n_embd // self.n_head,
            "d_ff": self.n_inner or 4 * self.n_embd,
            "norm_eps": self.layer_norm_epsilon or 1e-5,
            "weight_tying": self.tie_word_embeddings in (None, True),
        }

    def longest(self) -> int:
        """Positions that the model was made for, tokens."""
        return self.n_positions


@dataclass(frozen=True, kw_only=True)
class Llama:
    """As Gpt2."""

    model_class = "LlamaForCausalLM"
    presets: ClassVar[tuple[str, ...]] = ("llama", "llama3")
    style: ClassVar[dict[str, Any]] = {
        **dict(normalization="rmsnorm", activation="silu", position_encoding="rope", ffn_type="swiglu"),
        **dict(qkv_bias=False, qk_norm=False),
    }
    sizes = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", n_embd="hidden_size")
    sizes |= dict(d_ff="intermediate_size")
    usual_head_dim: ClassVar[int | None] = None  # transformers' default; None: of the width

    vocab_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    max_position_embeddings: Positive | None = None
    rms_norm_eps: Number | None = None
    rope_theta: Number | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: Any = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    hidden_act: Literal["silu", "swish"] = "silu"
    is_causal: Literal[True] = True

    def keys(self) -> dict[str, Any]:
        theta, scaling = _rope(self)
        return {
            "num_key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or self.usual_head_dim or self.hidden_size // self.num_attention_heads,
            "norm_eps": self.rms_norm_eps or 1e-6,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "weight_tying": bool(self.tie_word_embeddings),
            **self._more_keys(),
        }

    def _more_keys(self) -> dict[str, Any]:
        bias, mlp = bool(self.attention_bias), bool(self.mlp_bias)
        if bias != mlp:
            raise ValueError(f"attention_bias={bias}, mlp_bias={mlp}; all projections have biases, or none")
        return {"bias": bias} | ({"arch_preset": "llama3"} if self.vocab_size == LLAMA3_IDS else {})

    def longest(self) -> int:
        scaling = _rope(self)[1] or {}
        # a model card that adds YaRN leaves max_position_embeddings as it was
        scaled = round(scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", 0))
        return max(self.max_position_embeddings or 2048, min(scaled, rope_scaling.LONGEST))


@dataclass(frozen=True, kw_only=True)
class Qwen2(Llama):
    model_class = "Qwen2ForCausalLM"
    presets = ("qwen2",)
    style = Llama.style | {"bias": False, "qkv_bias": True}

    use_sliding_window: bool = False
    sliding_window: Any = 4096
    max_window_layers: Any = 28
    layer_types: Any = None

    def _more_keys(self) -> dict[str, Any]:
        """None. Raises ValueError unless every layer attends to all positions."""
        longest, types = self.longest(), self.layer_types
        window = self.sliding_window if self.use_sliding_window else None
        if types is None:
            first = self.max_window_layers
            slides = window is not None and not (type(first) is int and first >= self.num_hidden_layers)
            types = ["sliding_attention"] if slides else []
        wide = type(window) is int and window >= longest
        full = ("full_attention", "sliding_attention")[: 1 + wide]
        if not isinstance(types, list) or any(one not in full for one in types):
            stated = f"use_sliding_window={window is not None}, sliding_window={shown(window)}"
            why = f"every layer must attend to all {longest:,} positions"
            raise ValueError(f"{stated}, layer_types={shown(types)}; {why}")
        return {}


@dataclass(frozen=True, kw_only=True)
class Qwen3(Qwen2):
    model_class = "Qwen3ForCausalLM"
    presets = ("qwen3",)
    style = Llama.style | {"bias": False, "qk_norm": True}
    usual_head_dim = 128

    attention_bias: Literal[False] = False


# by model_type in config.json
FAMILIES: dict[str, type[Gpt2 | Llama]] = {"gpt2": Gpt2, "llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3}


@dataclass(frozen=True)
class Architecture:
    """What a config.json says of the model."""

    family: str  # of FAMILIES
    keys: dict[str, Any]  # keys of TrainConfig
    longest: int  # positions that the model was made for, tokens
    fields: dict[str, Any]  # all of config.json


def read_architecture(fields: dict[str, Any], where: str) -> Architecture:
    """`fields`: the content of a config.json; `where`: its name in messages. Raises UserError."""
    name = fields.get("model_type")
    try:
        if not isinstance(name, str) or name not in FAMILIES:
            known = f"the families that can be read are {', '.join(FAMILIES)}"
            raise ValueError(f"model_type={shown(name)}; {known} (LLaMA 2 and 3 and SmolLM2 are llama)")
        for quantized in ("quantization_config", "compression_config"):
            if fields.get(quantized):
                raise ValueError(f"{quantized}; quantized weights cannot be trained; get the originals")
        found: Gpt2 | Llama = parse(FAMILIES[name], fields)
        keys = {"arch_preset": found.presets[0], **found.style, "vocab_size": found.vocab_size}
        keys |= {key: getattr(found, field) for key, field in found.sizes.items()} | found.keys()
        return Architecture(name, keys, found.longest(), fields)
    except ValueError as error:
        raise UserError(f"{where} is none that nanoMFU can read: {error}") from None


def _rope(config: Llama) -> tuple[float, dict[str, Any] | None]:
    """(rope_theta, rope_scaling), from either spelling. Raises ValueError."""
    given: dict[str, Any] = {}
    for parameters in (config.rope_parameters or {}, config.rope_scaling or {}):
        for name, value in {"rope_type": parameters.get("type"), **parameters}.items():
            if value is not None and given.setdefault(name, value) != value:
                both = f"{shown(given[name])} in rope_parameters and {shown(value)} in rope_scaling"
                raise ValueError(f"{name}={both}, which must be equal")
    theta = parse(Number, given.pop("rope_theta", config.rope_theta or 10_000.0), "rope_theta")
    given.pop("type", None)
    kind = given.pop("rope_type", "default")
    if given.pop("partial_rotary_factor", config.partial_rotary_factor) not in (None, 1, 1.0):
        raise ValueError("partial_rotary_factor; all of a head is rotated here")
    if nested := [name for name, value in given.items() if isinstance(value, dict)]:
        raise ValueError(f"rope_parameters of {shown(nested[0])}; all layers have the same here")
    if kind == "default":
        return float(theta), None
    if given.get("truncate") is True:  # the bounds of YaRN's ramp are whole pairs, as without it
        del given["truncate"]
    if kind in ("yarn", "llama3"):  # transformers' default
        given.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    try:
        return float(theta), rope_scaling.parse({"rope_type": kind, **given}).to_dict()
    except ValueError as error:
        raise ValueError(f"rope_type={shown(kind)}; {error}") from None


# --- from a model ---


def family_of(model: ModelConfig) -> str:
    """The model_type that computes what this model computes. Raises UserError."""
    style = ("normalization", "activation", "position_encoding", "ffn_type")
    kind = {name: getattr(model, name) for name in style}
    like = [name for name, family in FAMILIES.items() if kind.items() <= family.style.items()]
    cannot = "so this one cannot be exported"
    if not like:
        stated = ", ".join(f"{name}={value!r}" for name, value in kind.items())
        raise UserError(f"no Hugging Face model has {stated} together, {cannot}")
    if like == ["gpt2"]:
        if model.n_kv_head != model.n_head or model.attention_width != model.n_embd or model.qk_norm:
            own = "num_key_value_heads, head_dim or qk_norm of its own"
            raise UserError(f"no Hugging Face model is a GPT-2 with {own}, {cannot}")
        return "gpt2"
    if model.qk_norm and (model.bias or model.qkv_bias):
        raise UserError(f"no Hugging Face model has both qk_norm and biases, {cannot}")
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
