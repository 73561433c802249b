"""Writes any tokenizer as the files of a Hugging Face model: tokenizer.json and tokenizer_config.json."""

import json
import re
from pathlib import Path

from common.durable_file import write_bytes
from common.errors import UserError
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.families import PROBE
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.json_file import added_token, byte_letters
from data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer, all_merges
from data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer
from data.tokenizers.tokenizer import SubwordTokenizer

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
# x{1,3}+ takes as many as it can in tiktoken's regular expressions, and repeats x{1,3} in those of tokenizers
COUNTED = re.compile(r"(\{\d+,?\d*\})\+")


def write_tokenizer(folder: Path, tokenizer: CharTokenizer | SubwordTokenizer, eot_id: int | None) -> None:
    """eot_id: of the token that ends a document, if there is one."""
    if isinstance(tokenizer, FileTokenizer):
        write_content(folder, tokenizer.content.decode(), eot_id)
    elif not isinstance(tokenizer, SentencePieceTokenizer):
        write_content(folder, _make(tokenizer), eot_id)
    elif tokenizer.as_json is not None:
        write_content(folder, tokenizer.as_json, eot_id)
    else:
        write_bytes(folder / tokenizer.file_name, tokenizer.content)
        print(f"no {FILE} has the ids of tokenizer.model: transformers may encode a text otherwise")


def write_content(folder: Path, content: str, eot_id: int | None) -> None:
    """content: of a tokenizer.json."""
    added = {token["id"]: token["content"] for token in json.loads(content).get("added_tokens") or []}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"eos_token": added[eot_id]} if eot_id in added else {}
    write_bytes(folder / FILE, content.encode())
    write_bytes(folder / CONFIG, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())


def _make(tokenizer: CharTokenizer | TiktokenTokenizer) -> str:
    """The content of a tokenizer.json that gives the same ids."""
    from tokenizers import Tokenizer as Library

    if isinstance(tokenizer, CharTokenizer):
        made, probe = _from_chars(tokenizer), tokenizer.chars
    else:
        made, probe = _from_tiktoken(tokenizer), PROBE
    content = json.dumps(made, ensure_ascii=False)
    if Library.from_str(content).encode(probe, add_special_tokens=False).ids != tokenizer.encode(probe):
        raise UserError(f"the tokenizer {tokenizer.meta['name']!r} cannot be written as a {FILE}")
    return content


def _from_tiktoken(tokenizer: TiktokenTokenizer) -> dict:
    encoding, letters = tokenizer.encoding, byte_letters()
    special = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    ids = set(range(encoding.n_vocab)) - set(special.values())
    tokens = {}
    for number in sorted(ids):
        try:
            token = encoding.decode_single_token_bytes(number)
        except KeyError:  # some encodings have gaps before their special tokens
            continue
        tokens["".join(letters[byte] for byte in token)] = number
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = {"Regex": COUNTED.sub(r"\1", encoding._pat_str)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [added_token(number, name) for name, number in sorted(special.items())],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
        "model": {"type": "BPE", "vocab": tokens, "merges": all_merges(tokens, tokens)},
    }


def _from_chars(tokenizer: CharTokenizer) -> dict:
    split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": split,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": tokenizer.ids, "unk_token": ""},  # unknown is an error
    }
