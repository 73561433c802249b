"""Translates between a model's keys and Hugging Face's config.json, in both directions.

Both spellings of config.json are read: transformers 4 writes rope_theta, rope_scaling and torch_dtype,
transformers 5 writes rope_parameters and dtype. What the model cannot compute is refused by its name in
config.json: weights that fit would otherwise give wrong logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rope_scaling
from common.errors import UserError
from common.text import shown
from model_config import ModelConfig
from rope_scaling import RopeScaling, YarnScaling
from training.pretrained.config_fields import LARGEST, ConfigFields

# names of the tanh approximation; config.json is written with the first
GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
SILU = ("silu", "swish")
LLAMA3_IDS = 128_256

# model types that look like one of ours -> what they have that ours has not
KNOWN_OTHERS = {
    "smollm3": "it has layers without rotary positions",
    "mistral": "its attention may see a window alone",
    "mixtral": "it is a mixture of experts",
    "qwen2_moe": "it is a mixture of experts",
    "qwen3_moe": "it is a mixture of experts",
    "llama4": "it is a mixture of experts with layers without rotary positions",
    "llama4_text": "it is a mixture of experts with layers without rotary positions",
}


@dataclass(frozen=True)
class Architecture:
    """What a config.json says of the model."""

    family: str  # model_type in config.json
    keys: dict[str, Any]  # keys of TrainConfig
    longest: int  # positions that the model was made for, tokens
    fields: dict[str, Any]  # all of config.json


def read_architecture(fields: dict[str, Any], where: str) -> Architecture:
    """`fields`: the content of a config.json; `where`: its name in messages. Raises UserError."""
    config = ConfigFields(fields, where)
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise config.refused(f"model_type={shown(family)}", _why_not(family))
    for name in ("quantization_config", "compression_config"):
        if fields.get(name):
            raise config.refused(name, "quantized weights cannot be trained; get the originals")
    keys, longest = READERS[family](config)
    keys["vocab_size"] = config.whole("vocab_size")
    return Architecture(family, keys, longest, fields)


def _why_not(family: object) -> str:
    known = ", ".join(READERS)
    if isinstance(family, str) and family in KNOWN_OTHERS:
        return f"{KNOWN_OTHERS[family]}; the families that can be read are {known}"
    return f"the families that can be read are {known} (LLaMA 2 and 3 and SmolLM2 are of type llama)"


# --- from config.json ---


def _read_gpt2(config: ConfigFields) -> tuple[dict[str, Any], int]:
    config.require("activation_function", "gelu_new", *GELU)
    config.require("scale_attn_weights", True, True)
    config.require("scale_attn_by_inverse_layer_idx", False, False)
    config.require("add_cross_attention", False, False)
    config.require("is_causal", True, True)
    width = config.whole("n_embd")
    keys = {
        "arch_preset": "gpt2",
        "n_layer": config.whole("n_layer"),
        "n_head": config.whole("n_head"),
        "n_embd": width,
        "num_key_value_heads": config.whole("n_head"),
        "head_dim": width // config.whole("n_head"),
        "d_ff": config.whole("n_inner", 4 * width),
        "normalization": "layernorm",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu",
        "position_encoding": "learned",
        "ffn_type": "mlp",
        "bias": True,
        "qkv_bias": False,
        "qk_norm": False,
        "weight_tying": config.flag("tie_word_embeddings", default=True),  # as in transformers
    }
    return keys, config.whole("n_positions")


def _read_decoder(config: ConfigFields) -> tuple[dict[str, Any], int]:
    """What LLaMA, Qwen2 and Qwen3 share."""
    config.require("hidden_act", "silu", *SILU)
    config.require("is_causal", True, True)
    heads, width = config.whole("num_attention_heads"), config.whole("hidden_size")
    theta, scaling = config.rope()
    keys = {
        "n_layer": config.whole("num_hidden_layers"),
        "n_head": heads,
        "n_embd": width,
        "num_key_value_heads": config.whole("num_key_value_heads", heads),
        "head_dim": config.whole("head_dim", width // heads),
        "d_ff": config.whole("intermediate_size"),
        "normalization": "rmsnorm",
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "activation": "silu",
        "position_encoding": "rope",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "ffn_type": "swiglu",
        "weight_tying": config.flag("tie_word_embeddings"),
    }
    return keys, _positions(config, scaling or {})


def _positions(config: ConfigFields, scaling: dict[str, Any]) -> int:
    """That the model was made for. A model card that adds YaRN leaves max_position_embeddings as it was."""
    scaled = scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", 0)
    return max(config.whole("max_position_embeddings", 2048), min(round(scaled), rope_scaling.LONGEST))


def _require_no_window(config: ConfigFields, layers: int, positions: int) -> None:
    """Raises UserError if a layer of Qwen's does not see all tokens before it. A window no shorter than all
    positions hides none."""
    window = config.fields.get("sliding_window", 4096) if config.flag("use_sliding_window") else None
    if window is not None:
        window = config.whole("sliding_window", 4096)
    types = config.fields.get("layer_types")
    if types is None:
        first = config.fields.get("max_window_layers", 28)  # transformers' default, as 4096 above
        slides = window is not None and (type(first) is not int or first < layers)
    elif isinstance(types, list) and all(one in ("full_attention", "sliding_attention") for one in types):
        slides = "sliding_attention" in types
    else:
        raise config.refused(f"layer_types={shown(types)}", "every layer must be full_attention")
    if slides and (window is None or window < positions):
        what = f"sliding_window={window} in use, with {positions:,} positions"
        raise config.refused(what, "every token sees all before it here")


def _read_llama(config: ConfigFields) -> tuple[dict[str, Any], int]:
    keys, longest = _read_decoder(config)
    biases = {name: config.flag(name) for name in ("attention_bias", "mlp_bias")}
    if len(set(biases.values())) > 1:
        stated = ", ".join(f"{name}={value}" for name, value in biases.items())
        raise config.refused(stated, "either all projections have biases, or none has")
    preset = "llama3" if config.whole("vocab_size") == LLAMA3_IDS else "llama"
    own = {"bias": biases["attention_bias"], "qkv_bias": False, "qk_norm": False}
    return {"arch_preset": preset, **keys, **own}, longest


def _read_qwen2(config: ConfigFields) -> tuple[dict[str, Any], int]:
    keys, longest = _read_decoder(config)
    _require_no_window(config, keys["n_layer"], longest)
    return {"arch_preset": "qwen2", **keys, "bias": False, "qkv_bias": True, "qk_norm": False}, longest


def _read_qwen3(config: ConfigFields) -> tuple[dict[str, Any], int]:
    keys, longest = _read_decoder(config)
    _require_no_window(config, keys["n_layer"], longest)
    config.require("attention_bias", False, False)
    if config.fields.get("head_dim") is None:
        keys["head_dim"] = 128  # transformers' default
    return {"arch_preset": "qwen3", **keys, "bias": False, "qkv_bias": False, "qk_norm": True}, longest


READERS: dict[str, Callable[[ConfigFields], tuple[dict[str, Any], int]]] = {
    "gpt2": _read_gpt2,
    "llama": _read_llama,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
}
PRESETS = {"gpt2": ("gpt2",), "llama": ("llama", "llama3"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}


# --- to config.json ---

CLASSES = {"gpt2": "GPT2", "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def family_of(model: ModelConfig) -> str:
    """The model_type that computes what this model computes. Raises UserError."""
    kind = (model.normalization, model.activation, model.position_encoding, model.ffn_type)
    if kind == ("layernorm", "gelu", "learned", "mlp"):
        plain = model.n_kv_head == model.n_head and model.attention_width == model.n_embd
        if plain and not model.qk_norm:
            return "gpt2"
        raise UserError(
            "no Hugging Face model is a GPT-2 with num_key_value_heads, head_dim or qk_norm of its own, so "
            "this one cannot be exported"
        )
    if kind == ("rmsnorm", "silu", "rope", "swiglu"):
        biases = model.bias or model.qkv_bias
        if not (model.qk_norm and biases):
            return "qwen3" if model.qk_norm else "qwen2" if model.qkv_bias else "llama"
        raise UserError("no Hugging Face model has both qk_norm and biases, so this one cannot be exported")
    raise UserError(
        f"no Hugging Face model has normalization={model.normalization!r}, activation={model.activation!r}, "
        f"position_encoding={model.position_encoding!r} and ffn_type={model.ffn_type!r} together, so this "
        "one cannot be exported"
    )


def write_architecture(model: ModelConfig, dtype: str, origin: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json that transformers 4.51 and later read. `origin`: that of the weights which
    the run began with, or {}; what the model's keys do not say, such as special tokens, is taken from it."""
    family = family_of(model)
    common = {
        "architectures": [f"{CLASSES[family]}{'LMHeadModel' if family == 'gpt2' else 'ForCausalLM'}"],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.weight_tying,
        "initializer_range": 0.02,
        "use_cache": True,
        **{name: _id(origin.get(name), model) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        # transformers 4 reads the first, transformers 5 the second; each ignores the other
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    own = _gpt2_fields(model) if family == "gpt2" else _decoder_fields(model, family, origin)
    return dict(sorted({**common, **own}.items()))


def _id(value: object, model: ModelConfig) -> int | list[int] | None:
    """A token id, or several, if that is what it is."""
    if isinstance(value, list) and value and all(isinstance(_id(one, model), int) for one in value):
        return list(value)
    return value if type(value) is int and 0 <= value < model.vocab_size else None


def _gpt2_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_embd": model.n_embd,
        "n_inner": None if model.d_ff == 4 * model.n_embd else model.d_ff,
        "n_positions": model.block_size,
        "activation_function": GELU[0],
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        "add_cross_attention": False,
        "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
    }


def _stated(scaling: RopeScaling) -> dict[str, Any]:
    """Its fields without those that have their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(scaling) if field.init}
    return {name: value for name, value in scaling.to_dict().items() if value != defaults.get(name)}


def _decoder_fields(model: ModelConfig, family: str, origin: dict[str, Any]) -> dict[str, Any]:
    scaling = _stated(model.rope_scaling) if model.rope_scaling else None
    longest = origin.get("max_position_embeddings")
    longest = max(model.block_size, longest if type(longest) is int and longest < LARGEST else 0)
    if isinstance(model.rope_scaling, YarnScaling):
        # transformers 4 computes the factor from these two
        longest = round(model.rope_scaling.factor * model.rope_scaling.original_max_position_embeddings)
    fields: dict[str, Any] = {
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.n_kv_head,
        "hidden_size": model.n_embd,
        "head_dim": model.head_dim,
        "intermediate_size": model.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": longest,
        "attention_dropout": model.dropout,
        # transformers 4 reads the first two, transformers 5 the third
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": model.rope_theta},
    }
    if family == "llama":
        return {**fields, "attention_bias": model.bias, "mlp_bias": model.bias, "pretraining_tp": 1}
    if family == "qwen3":
        fields["attention_bias"] = False
    elif model.attention_width == model.n_embd:
        del fields["head_dim"]  # Qwen2 has none, and some readers do not expect it
    window = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.n_layer}
    return {**fields, **window, "layer_types": ["full_attention"] * model.n_layer}
