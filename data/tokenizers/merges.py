"""Makes a tokenizer.json of vocab.json and merges.txt, the two files of older GPT-2 and Qwen tokenizers.

The two files do not say how text is normalized and cut into words. The class that tokenizer_config.json names
decides it: GPT-2 does not normalize and keeps a run of digits together; Qwen applies NFC and makes each digit
a word. Any other class is refused, because its rules would be a guess.
"""

import json
from pathlib import Path

from common.errors import UserError
from common.json_file import read_json
from data.tokenizers.model_file import MOST_BYTES, added_token, byte_letters, read_file

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def convert(path: Path) -> str:
    """The content of a tokenizer.json that gives the same ids as this vocab.json and the files beside it."""
    folder = path.parent
    try:
        config = _read(folder / "tokenizer_config.json")
        vocab, merges = _read(path), _read_merges(folder / "merges.txt")
        _check(vocab, merges)
        rules = _rules(config)
        added = _added_tokens(folder, config, vocab)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        save = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise UserError(
            f"{folder} has no tokenizer.json, and what its ids are is not certain: {error}. Make one with\n"
            f"    pip install transformers\n"
            f'    python -c "from transformers import AutoTokenizer; {save}"'
        ) from None
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content = {"version": "1.0", "added_tokens": added, **rules, "decoder": level, "model": model}
    return json.dumps(content, ensure_ascii=False)


def _read(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"there is no {path.name}")
    try:
        return read_json(path, MOST_BYTES)
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON ({error})") from None


def _read_merges(path: Path) -> list[list[str]]:
    if not path.is_file():
        raise ValueError(f"there is no {path.name}")
    lines = [line.rstrip("\r") for line in read_file(path).decode().split("\n")]
    first = 1 if lines[0].startswith("#version") else 0
    return [line.split(" ") for line in lines[first:] if line]


def _check(vocab: dict, merges: list[list[str]]) -> None:
    if sorted(vocab.values()) != list(range(len(vocab))):
        raise ValueError(f"the ids of vocab.json are not 0 to {len(vocab) - 1}")
    if missing := set(byte_letters().values()) - vocab.keys():
        raise ValueError(f"vocab.json lacks {len(missing)} of the 256 bytes")
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise ValueError(f"merges.txt has {' '.join(pair)!r}, which vocab.json does not know")


def _rules(config: dict) -> dict:
    """The normalizer and pre-tokenizer of the transformers class that tokenizer_config.json names."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    prefix_space = bool(config.get("add_prefix_space", False))
    level = {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True}
    if kind == "GPT2Tokenizer":
        return {"normalizer": None, "pre_tokenizer": {**level, "use_regex": True}}
    if kind != "Qwen2Tokenizer":
        raise ValueError(
            f"tokenizer_config.json says tokenizer_class {kind}, not GPT2Tokenizer or Qwen2Tokenizer"
        )
    if prefix_space:
        raise ValueError("tokenizer_config.json asks Qwen2Tokenizer for add_prefix_space")
    words = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    steps = [words, {**level, "use_regex": False}]
    return {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


def _added_tokens(folder: Path, config: dict, vocab: dict) -> list[dict]:
    """From tokenizer_config.json, or from two other files, where older versions of transformers put them."""
    if "added_tokens_decoder" in config:
        found = [
            added_token(int(number), token["content"], token["special"])
            | {flag: bool(token.get(flag, False)) for flag in FLAGS}
            for number, token in config["added_tokens_decoder"].items()
        ]
    else:
        special = _special_names(config)
        if (folder / "special_tokens_map.json").is_file():
            special |= _special_names(_read(folder / "special_tokens_map.json"))
        ids = {name: vocab[name] for name in special if name in vocab}
        if (folder / "added_tokens.json").is_file():
            ids |= _read(folder / "added_tokens.json")
        found = [added_token(number, name, name in special) for name, number in ids.items()]
    found.sort(key=lambda token: token["id"])
    new = [token["id"] for token in found if token["content"] not in vocab]
    if new != list(range(len(vocab), len(vocab) + len(new))):
        raise ValueError(f"the ids of its added tokens do not follow the {len(vocab)} of vocab.json")
    for token in found:
        if vocab.get(token["content"], token["id"]) != token["id"]:
            raise ValueError(f"vocab.json has another id for {token['content']}")
    return found


def _special_names(config: dict) -> set[str]:
    """The tokens in keys such as "eos_token": "</s>" or {"content": "</s>"}, and the additional ones."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    named += config.get("additional_special_tokens") or []
    contents = (value.get("content") if isinstance(value, dict) else value for value in named)
    return {content for content in contents if isinstance(content, str)}
