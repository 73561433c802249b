"""Translates Hugging Face's config.json to a model's keys, by one table; writing.py reads it the other way.

Both spellings of config.json are read: transformers 4 writes rope_theta, rope_scaling and torch_dtype,
transformers 5 writes rope_parameters and dtype. What the model cannot compute is refused by its name in
config.json: weights that fit would otherwise give wrong logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import rope_scaling
from common.errors import UserError
from common.text import shown
from model_config import ModelConfig
from training.pretrained.config_fields import ConfigFields

LLAMA3_IDS = 128_256


@dataclass(frozen=True)
class Family:
    """A model_type of config.json that can be read and written."""

    model_class: str
    presets: tuple[str, ...]  # values of arch_preset that are such models
    keys: dict[str, Any]  # of the model, whatever config.json says
    sizes: dict[str, str]  # key of the model -> its name in config.json
    required: dict[str, tuple]  # name in config.json -> values that can be computed; absent, it is the first


def _decoder(model_class: str, presets: tuple[str, ...], keys: dict, required: dict | None = None) -> Family:
    """LLaMA and what is like it."""
    style = dict(normalization="rmsnorm", activation="silu", position_encoding="rope", ffn_type="swiglu")
    sizes = dict(n_layer="num_hidden_layers", n_head="num_attention_heads", n_embd="hidden_size")
    shared: dict[str, tuple] = {"hidden_act": ("silu", "swish"), "is_causal": (True,)}
    return Family(
        *(f"{model_class}ForCausalLM", presets, style | {"qkv_bias": False, "qk_norm": False} | keys),
        *(sizes | {"d_ff": "intermediate_size"}, shared | (required or {})),
    )


SLIDING = {"use_sliding_window": (False, True)}  # _check_windows() decides
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        ("gpt2",),
        dict(normalization="layernorm", activation="gelu", position_encoding="learned", ffn_type="mlp")
        | {"bias": True, "qkv_bias": False, "qk_norm": False},
        dict(n_layer="n_layer", n_head="n_head", n_embd="n_embd"),
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),  # the tanh approximation
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "is_causal": (True,),
        },
    ),
    "llama": _decoder("Llama", ("llama", "llama3"), {}),
    "qwen2": _decoder("Qwen2", ("qwen2",), {"bias": False, "qkv_bias": True}, SLIDING),
    "qwen3": _decoder(
        "Qwen3", ("qwen3",), {"bias": False, "qk_norm": True}, SLIDING | {"attention_bias": (False,)}
    ),
}


@dataclass(frozen=True)
class Architecture:
    """What a config.json says of the model."""

    family: str  # model_type in config.json
    keys: dict[str, Any]  # keys of TrainConfig
    longest: int  # positions that the model was made for, tokens
    fields: dict[str, Any]  # all of config.json


# --- from config.json ---


def read_architecture(fields: dict[str, Any], where: str) -> Architecture:
    """`fields`: the content of a config.json; `where`: its name in messages. Raises UserError."""
    config = ConfigFields(fields, where)
    name = fields.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = f"the families that can be read are {', '.join(FAMILIES)}"
        raise config.refused(f"model_type={shown(name)}", f"{known} (LLaMA 2 and 3 and SmolLM2 are llama)")
    for quantized in ("quantization_config", "compression_config"):
        if fields.get(quantized):
            raise config.refused(quantized, "quantized weights cannot be trained; get the originals")
    family = FAMILIES[name]
    for field, allowed in family.required.items():
        config.require(field, *allowed)
    keys = {"arch_preset": family.presets[0], **family.keys, "vocab_size": config.whole("vocab_size")}
    keys |= {key: config.whole(field) for key, field in family.sizes.items()}
    more, longest = (_gpt2_keys if name == "gpt2" else _decoder_keys)(config, name, keys)
    return Architecture(name, keys | more, longest, fields)


def _gpt2_keys(config: ConfigFields, name: str, keys: dict[str, Any]) -> tuple[dict[str, Any], int]:
    own = {
        "num_key_value_heads": keys["n_head"],
        "head_dim": keys["n_embd"] // keys["n_head"],
        "d_ff": config.whole("n_inner", 4 * keys["n_embd"]),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "weight_tying": config.flag("tie_word_embeddings", default=True),  # as in transformers
    }
    return own, config.whole("n_positions")


def _decoder_keys(config: ConfigFields, name: str, keys: dict[str, Any]) -> tuple[dict[str, Any], int]:
    theta, scaling = config.rope()
    head_dim = 128 if name == "qwen3" else keys["n_embd"] // keys["n_head"]  # transformers' defaults
    own: dict[str, Any] = {
        "num_key_value_heads": config.whole("num_key_value_heads", keys["n_head"]),
        "head_dim": config.whole("head_dim", head_dim),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "weight_tying": config.flag("tie_word_embeddings"),
    }
    if name == "llama":
        own["bias"], mlp = config.flag("attention_bias"), config.flag("mlp_bias")
        if own["bias"] != mlp:
            stated = f"attention_bias={own['bias']}, mlp_bias={mlp}"
            raise config.refused(stated, "either all projections have biases, or none has")
        if keys["vocab_size"] == LLAMA3_IDS:
            own["arch_preset"] = "llama3"
    # a model card that adds YaRN leaves max_position_embeddings as it was
    scaled = round(
        (scaling or {}).get("factor", 1) * (scaling or {}).get("original_max_position_embeddings", 0)
    )
    longest = max(config.whole("max_position_embeddings", 2048), min(scaled, rope_scaling.LONGEST))
    if name != "llama":
        _check_windows(config, keys["n_layer"], longest)
    return own, longest


def _check_windows(config: ConfigFields, n_layer: int, longest: int) -> None:
    """Raises UserError unless every layer attends to all positions. Defaults are those of transformers."""
    window = config.fields.get("sliding_window", 4096) if config.flag("use_sliding_window") else None
    first, types = config.fields.get("max_window_layers", 28), config.fields.get("layer_types")
    if types is None:
        slides = window is not None and not (type(first) is int and first >= n_layer)
        types = ["sliding_attention"] if slides else []
    wide = type(window) is int and window >= longest
    full = ("full_attention", "sliding_attention")[: 1 + wide]
    if not isinstance(types, list) or any(one not in full for one in types):
        stated = f"use_sliding_window={window is not None}, sliding_window={shown(window)}"
        why = f"every layer must attend to all {longest:,} positions"
        raise config.refused(f"{stated}, layer_types={shown(types)}", why)


# --- from a model ---


def family_of(model: ModelConfig) -> str:
    """The model_type that computes what this model computes. Raises UserError."""
    style = ("normalization", "activation", "position_encoding", "ffn_type")
    kind = {name: getattr(model, name) for name in style}
    like = [name for name, family in FAMILIES.items() if kind.items() <= family.keys.items()]
    if not like:
        stated = ", ".join(f"{name}={value!r}" for name, value in kind.items())
        raise UserError(f"no Hugging Face model has {stated} together, so this one cannot be exported")
    if like == ["gpt2"]:
        if model.n_kv_head != model.n_head or model.attention_width != model.n_embd or model.qk_norm:
            raise UserError(
                "no Hugging Face model is a GPT-2 with num_key_value_heads, head_dim or qk_norm of its own, "
                "so this one cannot be exported"
            )
        return "gpt2"
    if model.qk_norm and (model.bias or model.qkv_bias):
        raise UserError("no Hugging Face model has both qk_norm and biases, so this one cannot be exported")
    return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
