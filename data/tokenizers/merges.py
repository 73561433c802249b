"""Makes a tokenizer.json of vocab.json and merges.txt, the two files of older GPT-2 and Qwen tokenizers.

The two files do not say how text is normalized and cut into words. The class that tokenizer_config.json names
decides it: GPT-2 does not normalize and keeps a run of digits together; Qwen applies NFC and makes each digit
a word. Any other class is refused, because its rules would be a guess.
"""

import json
from pathlib import Path

from common.errors import UserError
from data.tokenizers.added_tokens import add_tokens_beside, read_beside
from data.tokenizers.model_file import byte_letters, read_file

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(path: Path) -> str:
    """The content of a tokenizer.json that gives the same ids as this vocab.json and the files beside it."""
    folder = path.parent
    try:
        config = _read(folder / "tokenizer_config.json")
        vocab, merges = _read(path), _read_merges(folder / "merges.txt")
        _check(vocab, merges)
        rules = _rules(config)
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "vocab": vocab, "merges": merges}
        content = {"version": "1.0", "added_tokens": [], **rules, "decoder": level, "model": model}
        return add_tokens_beside(json.dumps(content, ensure_ascii=False), folder)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        save = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        raise UserError(
            f"{folder} has no tokenizer.json, and what its ids are is not certain: {error}. Make one with\n"
            f"    pip install transformers\n"
            f'    python -c "from transformers import AutoTokenizer; {save}"'
        ) from None


def _read(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"there is no {path.name}")
    return read_beside(path)


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
