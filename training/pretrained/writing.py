"""Writes the weights of a checkpoint as a file of Hugging Face's. Each tensor is read from the checkpoint's
mapped files, converted, and written before the next, so that one at a time is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.durable_file import write_bytes
from common.errors import UserError
from model_config import ModelConfig
from training.checkpoints.tensor_files import Part, is_finite, write_tensors
from training.checkpoints.tensor_reader import TensorFiles
from training.pretrained.architecture import write_architecture
from training.pretrained.folder import CONFIG, GENERATION, SINGLE
from training.pretrained.generation_settings import exported_generation
from training.pretrained.names import Piece, pieces


def write_model(
    folder: Path,
    reader: TensorFiles,
    model: ModelConfig,
    dtype: torch.dtype,
    began_with: dict[str, Any],
    eot_id: int | None = None,
) -> None:
    """Weights, config.json and generation_config.json, into an empty folder. `began_with`: what
    first_weights() gives; `eot_id`: of the token that ends a document. Raises UserError."""
    origin = dict(began_with.get("config", {}))
    if origin.get("eos_token_id") is None:
        origin["eos_token_id"] = eot_id
    config = write_architecture(model, str(dtype).removeprefix("torch."), origin)
    found = pieces(model)
    parts = [_part(piece, dtype) for piece in found]
    write_tensors(folder / SINGLE, parts, _tensors(reader, found, dtype), {})
    _write_json(folder / CONFIG, config)
    _write_json(folder / GENERATION, exported_generation(began_with, config, eot_id))


def model_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    return sum(_part(piece, dtype).bytes for piece in pieces(model))


def _part(piece: Piece, dtype: torch.dtype) -> Part:
    return Part(piece.name, (0,) * len(piece.shape), piece.stored_shape, dtype)


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
