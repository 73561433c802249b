"""Writes the weights of a checkpoint, and their config.json, as files of Hugging Face's. Each tensor is read
from the checkpoint's mapped files, converted, and written before the next, so that one at a time is in
memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.durable_file import write_bytes
from common.errors import UserError
from common.schema import LARGEST
from model_config import ModelConfig
from rope_scaling import RopeScaling, YarnScaling
from training.checkpoints.tensor_files import Part, is_finite, write_tensors
from training.checkpoints.tensor_reader import TensorFiles
from training.pretrained.architecture import FAMILIES, family_of
from training.pretrained.folder import CONFIG, GENERATION, SINGLE
from training.pretrained.generation_settings import exported_generation
from training.pretrained.names import Piece, pieces


def write_model(
    folder: Path,
    reader: TensorFiles,
    model: ModelConfig,
    dtype: torch.dtype,
    pretrained: dict[str, Any] | None,
    eot_id: int | None = None,
) -> None:
    """Weights, config.json and generation_config.json, into an empty folder. `pretrained`:
    what the checkpoint says of the weights that its run began with; `eot_id`: of the token that ends a
    document. Raises UserError."""
    began_with = pretrained or {}
    origin = dict(began_with.get("config", {}))
    if origin.get("eos_token_id") is None:
        origin["eos_token_id"] = eot_id
    config = write_architecture(model, str(dtype).removeprefix("torch."), origin)
    found = pieces(model)
    parts = [Part(piece.name, (0,) * len(piece.shape), piece.stored_shape, dtype) for piece in found]
    write_tensors(folder / SINGLE, parts, _tensors(reader, found, dtype), {})
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENERATION, exported_generation(began_with, config, eot_id))


def _tensors(reader: TensorFiles, found: list[Piece], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for piece in found:
        if piece.is_zero:
            yield torch.zeros(piece.stored_shape, dtype=dtype)
            continue
        tensor = reader.read_rows(f"model.{piece.ours}", piece.rows).to(dtype)
        if not is_finite(tensor):
            raise UserError(
                f"{piece.name} has a value that {str(dtype).removeprefix('torch.')} cannot hold, or that is "
                "NaN; choose another --dtype, or another --checkpoint"
            )
        yield tensor.t() if piece.transposed else tensor


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_bytes(path, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def write_architecture(model: ModelConfig, dtype: str, origin: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json that transformers 4.51 and later read; what it does not state has
    transformers' default. `origin`: that of the weights which the run began with, or {}; what the model's
    keys do not say, such as special tokens, is taken from it."""
    name = family_of(model)
    family = FAMILIES[name]
    stated = {one.name: one.default for one in dataclasses.fields(family) if type(one.default) in (bool, str)}
    fields = {
        "architectures": [family.model_class],
        "model_type": name,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.weight_tying,
        **{id: _id(origin.get(id), model) for id in ("bos_token_id", "eos_token_id", "pad_token_id")},
        # transformers 4 reads the first, transformers 5 the second; each ignores the other
        "torch_dtype": dtype,
        "dtype": dtype,
        **{field: value for field, value in stated.items() if field != "is_causal"},
        **{field: getattr(model, key) for key, field in family.sizes.items()},
        **(_gpt2_fields(model) if name == "gpt2" else _decoder_fields(model, name, origin)),
    }
    return dict(sorted(fields.items()))


def _id(value: object, model: ModelConfig) -> int | list[int] | None:
    """A token id, or several, if that is what it is."""
    if isinstance(value, list) and value and all(isinstance(_id(one, model), int) for one in value):
        return list(value)
    return value if type(value) is int and 0 <= value < model.vocab_size else None


def _gpt2_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_inner": None if model.d_ff == 4 * model.n_embd else model.d_ff,
        "n_positions": model.block_size,
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    }


def _stated(scaling: RopeScaling) -> dict[str, Any]:
    """Its fields without those that have their default."""
    defaults = {field.name: field.default for field in dataclasses.fields(scaling) if field.init}
    return {name: value for name, value in scaling.to_dict().items() if value != defaults.get(name)}


def _decoder_fields(model: ModelConfig, name: str, origin: dict[str, Any]) -> dict[str, Any]:
    scaling = _stated(model.rope_scaling) if model.rope_scaling else None
    longest = origin.get("max_position_embeddings")
    longest = max(model.block_size, longest if type(longest) is int and longest < LARGEST else 0)
    if isinstance(model.rope_scaling, YarnScaling):
        # transformers 4 computes the factor from these two
        longest = round(model.rope_scaling.factor * model.rope_scaling.original_max_position_embeddings)
    fields: dict[str, Any] = {
        "num_key_value_heads": model.n_kv_head,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": longest,
        "attention_dropout": model.dropout,
        # transformers 4 reads the first two, transformers 5 the third
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": model.rope_theta},
    }
    if name == "llama":
        return {**fields, "attention_bias": model.bias, "mlp_bias": model.bias}
    if name == "qwen2" and model.attention_width == model.n_embd:
        del fields["head_dim"]  # Qwen2 has none, and some readers do not expect it
    return fields
