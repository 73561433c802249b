"""Refuses a tokenizer of which other files of its folder say what its own file does not.

Older versions of transformers, and people, put added tokens and settings into tokenizer_config.json and
added_tokens.json alone. The libraries that encode here read one file, so a text would get other ids than in
the model. Special tokens are never made of text: those that only another file names are not needed.
"""

import json
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from common.json_file import read_json
from data.tokenizers.json_file import MOST_BYTES

CONFIG, ADDED = "tokenizer_config.json", "added_tokens.json"
# What belongs to a tokenizer beside its own file; a model may have several chat templates
BESIDE = (CONFIG, ADDED, "special_tokens_map.json", "*.jinja", "additional_chat_templates/*.jinja")
# Settings that tokenizer_config.json repeats: {its key: key of a step in tokenizer.json}
REPEATED = {
    "add_prefix_space": "add_prefix_space",
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def check_files_beside(path: Path, added_id: Callable[[str], int | None], content: str | None = None) -> None:
    """added_id: the id of a token that is found in a text before any other; content: of a tokenizer.json.
    Raises UserError."""
    try:
        config = _read(path.parent / CONFIG)
        _check_tokens(config, path.parent, added_id)
        if content is not None and REPEATED.keys() & config.keys():
            _check_settings(config, json.loads(content))
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} and the files beside it are not one tokenizer: {error}. Save it again, as one "
            f"tokenizer.json, with transformers: AutoTokenizer.from_pretrained({str(path.parent)!r})"
            ".save_pretrained(...)"
        ) from None


def _check_tokens(config: dict, folder: Path, added_id: Callable[[str], int | None]) -> None:
    if "added_tokens_decoder" in config:
        decoder = config["added_tokens_decoder"].items()
        listed = {token["content"]: int(number) for number, token in decoder if not token.get("special")}
    else:  # special are those that a value beside the list spells, such as "eos_token": "</s>"
        special = json.dumps([config, _read(folder / "special_tokens_map.json")])
        added = _read(folder / ADDED).items()
        listed = {name: number for name, number in added if json.dumps(name) not in special}
    for name, number in listed.items():
        if (found := added_id(name)) != number:
            has = "has no such added token" if found is None else f"has it as {found}"
            raise ValueError(f"{CONFIG} or {ADDED} adds {name!r:.80} as {number}, and the tokenizer {has}")


def _check_settings(config: dict, tokenizer: dict) -> None:
    steps = json.dumps([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")])
    for key, own in REPEATED.items():
        other = not config.get(key)
        if isinstance(config.get(key), bool) and f'"{own}": {json.dumps(other)}' in steps:
            raise ValueError(f"{CONFIG} says {key}={config[key]}, and tokenizer.json {own}={other}")


def _read(path: Path) -> dict:
    try:
        return read_json(path, MOST_BYTES) if path.exists() or path.is_symlink() else {}
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None
