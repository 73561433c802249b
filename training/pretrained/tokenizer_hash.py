"""Whether the tokens of a dataset are of the tokenizer beside some weights, by hashes alone: a training run
imports no tokenizer library. Sampling and export compare ids (same_tokenizer.py).

A tokenizer has several hashes: of its file; of the rules in a tokenizer.json, which programs write in several
ways; and of its tokens, as tiktoken's encodings and characters have no file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.pipeline.meta_file import read_meta
from data.tokenizers.json_file import byte_letters, file_hash, tokenizer_json
from training.batches.sources import hash_json, tokenizer_identity

JSON, MODEL = "tokenizer.json", "tokenizer.model"
VOCABULARIES = (JSON, MODEL, "vocab.json")  # one of them makes a tokenizer
# {name in a meta.json that was written by hand: hash of tiktoken's encoding}
HASHES = {"gpt2": "55ba63b3ccb2e9c5e730eab37414b42caf44d3cfb7c5cdca35db483aac55fc0e"}


def another_tokenizer(weights: Path, dataset: Path) -> bool | None:
    """None if that is not known; also where the same ids are the same text, but other rules cut a text into
    them. Raises UserError."""
    recorded = read_meta(dataset)["tokenizer"] or {}
    known = tokenizer_identity(recorded)["sha256"] or HASHES.get(recorded.get("name", ""))
    theirs, their_ids, of_their_tokens = _read_folder(weights)
    if known is None or not theirs:
        return None
    if recorded.get("kind") in ("char", "tiktoken"):
        return known != of_their_tokens
    ours, our_ids, _ = _read_folder(dataset)
    if theirs & {known, *ours}:
        return False
    return None if None in (our_ids, their_ids) or our_ids == their_ids else True


def _read_folder(folder: Path) -> tuple[set[str], dict[str, int] | None, str | None]:
    """(the hashes of the tokenizer's files in a folder and of their rules, {token: id}, the hash of these
    tokens as one of tiktoken or of characters has it). Raises UserError."""
    found = {file_hash(folder / MODEL)} if (folder / MODEL).is_file() else set()
    if not (folder / JSON).is_file():
        return found, None, None
    content = tokenizer_json(folder / JSON)
    try:
        tokenizer = json.loads(content)
        model, vocab = tokenizer["model"], tokenizer["model"]["vocab"]
        ids = vocab if isinstance(vocab, dict) else {text: i for i, (text, _) in enumerate(vocab)}
        special = {token["content"] for token in tokenizer.get("added_tokens") or [] if token["special"]}
        tokens = [text for text in sorted(ids, key=ids.__getitem__) if text not in special]
        of_tokens = hash_json("".join(tokens)) if model["type"] == "WordLevel" else _hash_of_bytes(tokens)
        found |= {hashlib.sha256(content.encode()).hexdigest(), _hash_of_rules(tokenizer)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{folder / JSON} is not a tokenizer.json that can be read: {error}") from None
    return found, ids, of_tokens


def _hash_of_rules(tokenizer: dict[str, Any]) -> str:
    """Of what decides the ids of a text, apart from added tokens, as older and newer versions write it."""
    model = {key: value for key, value in tokenizer["model"].items() if value}
    model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    return hash_json([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer"), model])


def _hash_of_bytes(tokens: list[str]) -> str | None:
    """As that of an encoding of tiktoken's with these tokens; None if they are not bytes."""
    letters = {letter: byte for byte, letter in byte_letters().items()}
    try:
        vocabulary = sorted(bytes(letters[letter] for letter in token) for token in tokens)
    except KeyError:
        return None
    return hashlib.sha256(b"".join(len(token).to_bytes(4, "big") + token for token in vocabulary)).hexdigest()
