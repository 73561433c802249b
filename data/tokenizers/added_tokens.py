"""Tokens that are not in a tokenizer's own file, but in the files that transformers writes beside it.

They are counted as transformers counts them: those that added_tokens_decoder of tokenizer_config.json lists,
or else added_tokens.json, where older versions put them; then the special tokens that have a name, such as
pad_token. The trap: without them vocab_size is too small, and their text gets other ids than in the model.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.json_file import read_json

MOST_BYTES = 1 << 28  # of a tokenizer's file; those of the largest vocabularies have a tenth of it
CONFIG = "tokenizer_config.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Settings that tokenizer_config.json repeats: {its key: key of a step in tokenizer.json}
REPEATED = {
    "add_prefix_space": "add_prefix_space",
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def added_token(number: int, content: str, special: bool = True) -> dict:
    flags = dict.fromkeys(FLAGS, False)
    return {"id": number, "content": content, "special": special, **flags}


def read_beside(path: Path) -> dict:
    """The content of a JSON file; {} if there is none. Raises ValueError."""
    try:
        return read_json(path, MOST_BYTES) if os.path.lexists(path) else {}
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None


def add_tokens_beside(content: str, folder: Path) -> str:
    """The content of a tokenizer.json, with the added tokens of the other files of its folder; as it is if it
    has them all. Raises ValueError, and what a wrong type in a file raises."""
    config = read_beside(folder / CONFIG)
    if "added_tokens_decoder" not in config:
        config |= read_beside(folder / "special_tokens_map.json")
    special = list(dict.fromkeys(_special_names(config)))
    listed = _listed_tokens(config, folder, special)
    if not listed and not special and not REPEATED.keys() & config.keys():
        return content
    tokenizer = json.loads(content)
    _check_repeated(config, tokenizer)
    added = tokenizer.get("added_tokens") or []
    known = {token["content"] for token in added}
    vocab = tokenizer["model"]["vocab"]  # of Unigram, a list of [text, score]
    ids = dict(vocab) if isinstance(vocab, dict) else {text: i for i, (text, _) in enumerate(vocab)}
    ids |= {token["content"]: token["id"] for token in added}
    following = max(ids.values(), default=-1) + 1
    new = [token for token in listed if token["content"] not in known]
    known |= {token["content"] for token in new}
    new += [added_token(-1, name) for name in special if name not in known]
    for token in new:
        number = ids.setdefault(token["content"], following)
        following += number == following
        if token["id"] not in (-1, number):
            raise ValueError(
                f"the ids of the added tokens do not follow those of the vocabulary: {token['content']!r:.80}"
                f" should have {token['id']}, and would get {number}"
            )
        token["id"] = number
    if not new:
        return content
    tokenizer["added_tokens"] = sorted([*added, *new], key=lambda token: token["id"])
    return json.dumps(tokenizer, ensure_ascii=False)


def _listed_tokens(config: dict, folder: Path, special: list[str]) -> list[dict]:
    """Those with an id, in its order."""
    if "added_tokens_decoder" in config:
        found = [
            added_token(int(number), token["content"], bool(token.get("special", False)))
            | {flag: bool(token.get(flag, False)) for flag in FLAGS}
            for number, token in config["added_tokens_decoder"].items()
        ]
    else:
        found = [
            added_token(number, name, name in special) | {"normalized": name not in special}
            for name, number in read_beside(folder / "added_tokens.json").items()
        ]
    return sorted(found, key=lambda token: token["id"])


def _special_names(config: dict) -> Iterator[str]:
    """The tokens in keys such as "eos_token": "</s>" or {"content": "</s>"}, and the additional ones."""
    values = [config.get(key) for key in NAMED]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key) or []
        values += more.values() if isinstance(more, dict) else more
    contents = (value.get("content") if isinstance(value, dict) else value for value in values)
    return (content for content in contents if isinstance(content, str) and content)


def _check_repeated(config: dict, tokenizer: dict) -> None:
    for step in [*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))]:
        for key, own in REPEATED.items():
            asked = config.get(key)
            if isinstance(asked, bool) and step.get(own) not in (None, asked):
                raise ValueError(
                    f"{CONFIG} says {key}={asked}, and the step {step['type']} of the tokenizer says "
                    f"{own}={step[own]}; make the two agree"
                )


def _steps(step: Any) -> Iterator[dict]:
    """A normalizer or pre-tokenizer and those that it consists of."""
    if isinstance(step, dict):
        yield step
        for inner in step.get("normalizers") or step.get("pretokenizers") or []:
            yield from _steps(inner)
