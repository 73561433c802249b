"""The model that is evaluated: its weights, its tokenizer, and the precision in which it computes.

Matrices are converted once to the dtype in which the run computed, and vectors where they are used, as in
training. Low precision (fp8, MXFP8, NVFP4) is not used: the figures are those of the weights, and the record
says in which precision they were trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.json_file import read_json
from data.pipeline.meta_file import load_tokenizer
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from generation.cache import cached_attention
from generation.precision import compute_in
from model import Transformer
from training.checkpoints.folder import find_checkpoint
from training.checkpoints.loading import load_model
from training.checkpoints.saved_state import SavedState
from training.configuration.dataset_name import first_folder
from training.configuration.dtypes import DTYPES
from training.pretrained.folder import PREFIX, Weights
from training.pretrained.reading import load_pretrained
from training.pretrained.same_tokenizer import check_recorded, check_rows, identity, tokenizer_hash
from training.process.world import World, gather_objects

MAX_CONFIG = 1 << 24  # bytes of a tokenizer_config.json


@dataclass(frozen=True)
class Subject:
    model: Transformer
    tokenizer: Tokenizer
    # the id before a document's first token: end-of-text in a run of ours; None if there is no such token
    prefix_id: int | None
    adds_prefix: bool  # whether the tokenizer itself puts this id before every text, as LLaMA's do
    end_ids: frozenset[int]  # generated text ends before one of them
    facts: dict[str, Any]  # what the JSON says of model, precision and tokenizer

    @property
    def block_size(self) -> int:
        return self.model.config.block_size


class _Special(NamedTuple):
    """As in Subject."""

    prefix_id: int | None
    adds_prefix: bool
    end_ids: frozenset[int]


def load_checkpoint_subject(
    out_dir: Path, which: str, tokenizer_name: str | None, dtype: str | None, world: World
) -> Subject:
    """The subject of a run's checkpoint, the same one on every rank. All ranks. Raises UserError."""
    # a run that goes on may save another one before the last rank has looked
    name = gather_objects(find_checkpoint(out_dir, which).name, world)[0]
    folder, saved, model = load_model(out_dir, name, world.device, cached_attention)
    data = saved.data.get("sources", [saved.data])[0]
    if tokenizer_name:
        tokenizer: Tokenizer = open_tokenizer(tokenizer_name)
    else:
        tokenizer = load_tokenizer(first_folder(saved.config["dataset"]))
    fix = "name the model's own with --tokenizer"
    check_recorded(data["tokenizer"], str(folder), identity(tokenizer), "this evaluation", fix)
    computes = dtype or str(saved.config.get("dtype", "float32"))
    eot_id = data.get("eot_id")
    prefix_id = eot_id if type(eot_id) is int and 0 <= eot_id < model.config.vocab_size else None
    about = {
        "checkpoint": str(folder),
        "iteration": saved.iteration,
        "val_loss": saved.val_loss,
        "run": saved.run,
    }
    trained = {"dtype": saved.config.get("dtype"), "low_precision": _low_precision(saved)}
    special = _Special(prefix_id, False, frozenset() if prefix_id is None else frozenset([prefix_id]))
    return _subject(model, tokenizer, special, about, computes, trained)


def load_weights_subject(source: str, tokenizer_name: str | None, dtype: str | None, world: World) -> Subject:
    """The subject of weights in Hugging Face's format. All ranks. Raises UserError."""
    source = source if source.startswith(PREFIX) else f"{PREFIX}{source}"
    weights, model = load_pretrained(source, world.device, cached_attention)
    tokenizer = open_tokenizer(tokenizer_name or str(weights.folder))
    fix = "name the model's own with --tokenizer"
    check_rows(tokenizer, model.config.vocab_size, f"the model of {weights.folder}", fix)
    fields = weights.architecture().fields
    stored = fields.get("dtype") or fields.get("torch_dtype")
    computes = dtype or (stored if stored in DTYPES else "float32")
    about = {"weights": str(weights.folder), "commit": weights.commit}
    special = _special_of_weights(weights, tokenizer)
    return _subject(model, tokenizer, special, about, computes, {"dtype": stored})


def _subject(
    model: Transformer,
    tokenizer: Tokenizer,
    special: _Special,
    about: dict[str, Any],
    dtype: str,
    trained: dict[str, Any],
) -> Subject:
    compute_in(model, dtype)
    facts = {
        "model": {
            **about,
            "parameters": model.count_parameters()["total"],
            "block_size": model.config.block_size,
        },
        "precision": {"compute_dtype": dtype, "low_precision": "none", "attention": "sdpa"},
        "trained_in": trained,
        "tokenizer": {
            "kind": tokenizer.meta["kind"],
            "name": tokenizer.meta["name"],
            "sha256": tokenizer_hash(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "prefix_id": special.prefix_id,
        },
    }
    return Subject(model, tokenizer, *special, facts)


def _low_precision(saved: SavedState) -> str:
    return str(saved.config.get("low_precision", "none"))


def _special_of_weights(weights: Weights, tokenizer: Tokenizer) -> _Special:
    """Before a text is what lm-eval's `hf` puts there: beginning-of-text, else end-of-text."""
    fields = weights.architecture().fields.get("eos_token_id")
    listed = fields if isinstance(fields, list) else [fields]
    ends = [number for number in listed if type(number) is int and 0 <= number < tokenizer.vocab_size]
    named = {key: _token_id(weights, key, tokenizer) for key in ("bos_token", "eos_token")}
    end_ids = frozenset([*ends, *([] if named["eos_token"] is None else [named["eos_token"]])])
    if isinstance(tokenizer, FileTokenizer):
        ids = tokenizer.tokenizer.encode("", add_special_tokens=True).ids
        if len(ids) == 1:
            return _Special(ids[0], True, end_ids)
    found = [number for number in (*named.values(), *ends) if number is not None]
    return _Special(found[0] if found else None, False, end_ids)


def _token_id(weights: Weights, key: str, tokenizer: Tokenizer) -> int | None:
    """Of a special token that tokenizer_config.json names."""
    try:
        config = read_json(weights.folder / "tokenizer_config.json", MAX_CONFIG)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{weights.folder}/tokenizer_config.json cannot be read: {error}") from None
    token = config.get(key)
    token = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_id(token) if isinstance(token, str) else None
