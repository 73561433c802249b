"""Whether the tokens of a dataset are of the tokenizer beside some weights, by hashes and vocabularies: a
training run imports no tokenizer library. Sampling and export compare ids (same_tokenizer.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from data.pipeline.meta_file import read_meta
from data.tokenizers.json_file import byte_letters, file_hash, tokenizer_json
from training.batches.sources import hash_json, tokenizer_identity

JSON, MODEL = "tokenizer.json", "tokenizer.model"
VOCABULARIES = (JSON, MODEL, "vocab.json")  # one of them makes a tokenizer
# {name in a meta.json that was written by hand: hash of tiktoken's encoding}
HASHES = {"gpt2": "55ba63b3ccb2e9c5e730eab37414b42caf44d3cfb7c5cdca35db483aac55fc0e"}


class Files(NamedTuple):
    # of the files, and of the rules in a tokenizer.json, which programs write in several ways
    hashes: set[str]
    tokens: list[str] | None  # of a tokenizer.json, in the order of their ids
    without_file: str | None  # their hash in a dataset of tiktoken's tokens or of characters
    has_model: bool  # a tokenizer.model


def another_tokenizer(weights: Path, dataset: Path) -> bool | None:
    """None if that is not known: where the same ids are the same text, but other rules may cut a text into
    them, or where nothing can be compared. Raises UserError."""
    recorded = read_meta(dataset)["tokenizer"] or {}
    known = tokenizer_identity(recorded)["sha256"] or HASHES.get(recorded.get("name", ""))
    theirs = _read_files(weights)
    if known is None or not theirs.hashes:
        return None
    if recorded.get("kind") in ("char", "tiktoken"):
        return known != theirs.without_file
    ours = _read_files(dataset)
    if theirs.hashes & {known, *ours.hashes}:
        return False
    if ours.tokens is not None and theirs.tokens is not None:
        return None if ours.tokens == theirs.tokens else True
    return True if ours.has_model and theirs.has_model else None


def _read_files(folder: Path) -> Files:
    """Raises UserError."""
    has_model = (folder / MODEL).is_file()
    hashes = {file_hash(folder / MODEL)} if has_model else set()
    if not (folder / JSON).is_file():
        return Files(hashes, None, None, has_model)
    content = tokenizer_json(folder / JSON)
    try:
        tokenizer = json.loads(content)
        kind, vocab = tokenizer["model"]["type"], tokenizer["model"]["vocab"]
        tokens = (
            sorted(vocab, key=vocab.__getitem__) if isinstance(vocab, dict) else [text for text, _ in vocab]
        )
        special = {token["content"] for token in tokenizer.get("added_tokens") or [] if token["special"]}
        plain = [text for text in tokens if text not in special]
        without_file = hash_json("".join(plain)) if kind == "WordLevel" else _hash_as_tiktoken(plain)
        hashes |= {hashlib.sha256(content.encode()).hexdigest(), _hash_of_rules(tokenizer)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / JSON} is not a tokenizer.json that can be read: {error}") from None
    return Files(hashes, tokens, without_file, has_model)


def _hash_of_rules(tokenizer: dict[str, Any]) -> str:
    """Of what decides the ids of a text, apart from added tokens, as older and newer versions write it."""
    model = {key: value for key, value in tokenizer["model"].items() if value}
    model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    return hash_json([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer"), model])


def _hash_as_tiktoken(tokens: list[str]) -> str | None:
    """None if the tokens are not bytes."""
    letters = {letter: byte for byte, letter in byte_letters().items()}
    try:
        vocabulary = sorted(bytes(letters[letter] for letter in token) for token in tokens)
    except KeyError:
        return None
    return hashlib.sha256(b"".join(len(token).to_bytes(4, "big") + token for token in vocabulary)).hexdigest()
