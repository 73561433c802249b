"""Makes a tokenizer.json of a tokenizer.model: a SentencePiece file of BPE.

The file lists pieces and their ranks, but no merges. A piece can be merged from every pair of pieces that
together have its text. The merge gets the rank of its result, which is the order that the encoder uses.
Neither sentencepiece nor protobuf is needed. The idea is that of convert_slow_tokenizer.py in Hugging Face
transformers; test_sentencepiece.py compares the ids with those of the library. The trap: the file also says
how the text is changed first. A setting that a tokenizer.json cannot express with the same ids for every text
is refused by its name.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_regular
from data.tokenizers.added_tokens import MOST_BYTES, added_token

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # SentencePiece's piece types
UNIGRAM, BPE = 1, 2  # two of its model types
LONGEST_PIECE = 10_000  # characters; finding its merges takes time by the square of them
SPACE = "\u2581"
DUMMY_PREFIX: dict[str, Any] = {  # SentencePiece's name for the space that it puts before every text
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
LLAMA2_VOCAB_SHA256 = "77149dcd1714a5c3c732407f8a6be1cb82c1d6058f0896c6cf420a5768877566"


def read_file(path: Path) -> bytes:
    """The content of a tokenizer's file. Raises UserError."""
    try:
        return read_regular(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no tokenizer that can be read: {error}") from None


def convert(path: Path) -> str:
    """The content of a tokenizer.json that gives the ids of this tokenizer.model."""
    content = read_file(path)
    try:
        if content.split(b"\n", 1)[0].endswith(b" 0"):
            raise ValueError("it lists ranks, as that of LLaMA 3 does, and not how text is cut into words")
        return json.dumps(_from_sentencepiece(content), ensure_ascii=False)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is not a tokenizer.model whose ids are certain ({reason}); a tokenizer.json beside it, "
            "as transformers saves one, is read instead, with the ids that it gives"
        ) from None


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message. As in JSON, the file decides the type of a value:
    an int for a varint, otherwise bytes."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            if shift > 63:
                raise ValueError("a number in it has more than ten bytes")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(kind) or (varint() if kind == 2 else None)
        if size is None or position + size > len(message):
            raise ValueError("it is no SentencePiece model, or cut off")
        yield key >> 3, message[position : position + size]
        position += size


def _check_settings(specs: dict[int, dict[int, Any]], spaces: bool, types: dict[str, int]) -> None:
    """Raises ValueError for a setting that a tokenizer.json cannot express. specs: the fields of the file;
    spaces: whether any are added or removed."""
    trainer, normalizer, denormalizer = (specs.get(number, {}) for number in (2, 3, 5))
    symbols = [piece for piece, kind in types.items() if kind == USER_DEFINED]
    refused = {
        "model_type is not BPE": trainer.get(3, UNIGRAM) != BPE,
        f"normalization_rule_name={normalizer.get(1, b'').decode()} has a character map": normalizer.get(2),
        "the denormalizer has a character map": denormalizer.get(2),
        "treat_whitespace_as_suffix=true": trainer.get(24),
        "escape_whitespaces=false": not normalizer.get(5, True),
        "byte_fallback=false beside pieces for bytes": BYTE in types.values() and not trainer.get(35),
        "it has unused pieces": UNUSED in types.values(),
        "user_defined_symbols beside add_dummy_prefix or remove_extra_whitespaces": symbols and spaces,
        "user_defined_symbols with a space": any(" " in piece for piece in symbols),
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ValueError(f"of its SentencePiece settings, this one is not supported: {setting}")


def _from_sentencepiece(content: bytes) -> dict:
    pieces = []  # (piece, score, type), in the order of ids
    specs: dict[int, dict[int, Any]] = {}
    for number, value in _fields(content):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, bytes(4)))[0]
            pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
        elif number in (2, 3, 5):
            specs[number] = dict(_fields(value))
    # true where the file does not say it, as in sentencepiece_model.proto
    dummy_prefix, strip_spaces = (bool(specs.get(3, {}).get(number, True)) for number in (3, 4))
    spaces = dummy_prefix or strip_spaces
    if spaces:  # a symbol of one character that no other piece has is never merged: it is as any other piece
        count = Counter("".join(piece for piece, _, _ in pieces) + f" {SPACE}")
        alone = {piece for piece, _, kind in pieces if kind == USER_DEFINED and count[piece] == 1}
        pieces = [(piece, score, NORMAL if piece in alone else kind) for piece, score, kind in pieces]
    types = {piece: kind for piece, _, kind in pieces}
    _check_settings(specs, spaces, types)
    if UNKNOWN not in types.values():
        raise ValueError("it holds no piece for unknown text")
    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    ranked = {piece: -score for piece, score, kind in pieces if kind == NORMAL}
    merges = all_merges(ranked, vocab)
    made = {left + right for left, right in merges}
    # LLaMA 2's runs of spaces have one score, too, but merge to the same pieces in any order
    ranks = {(ranked[piece], piece if len(set(piece)) > 1 else piece[0]) for piece in made}
    if len({rank for rank, _ in ranks}) < len(ranks):
        raise ValueError("several of its pieces have one score, so the order of the merges is not certain")
    added = [
        added_token(i, piece, special=kind != USER_DEFINED) | {"normalized": kind == USER_DEFINED}
        for i, (piece, _, kind) in enumerate(pieces)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if dummy_prefix else []
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": _normalizer(dummy_prefix, strip_spaces),
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": next(piece for piece, _, kind in pieces if kind == UNKNOWN),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


def _normalizer(dummy_prefix: bool, strip_spaces: bool) -> dict[str, Any]:
    """What SentencePiece does with spaces: DUMMY_PREFIX is add_dummy_prefix without remove_extra_whitespaces.
    That setting removes spaces at both ends, and at the end also characters like SPACE of the text itself."""
    prefix, replace = DUMMY_PREFIX["normalizers"]
    before = [_replace(r"\A +", ""), _replace(" {2,}", " ")] if strip_spaces else []
    after = [_replace(rf"{SPACE}+\z", "")] if strip_spaces else []
    return {
        "type": "Sequence",
        "normalizers": [*before, *([prefix] if dummy_prefix else []), replace, *after],
    }


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def restore_prefix(content: str) -> str:
    """Puts SentencePiece's space before every text back into a tokenizer.json of LLaMA 2 that lacks it; any
    other content is returned as it is.

    transformers 5 saves a pre-tokenizer that leaves this space out before a text that begins with a space.
    """
    if '"Metaspace"' not in content:
        return content
    tokenizer = json.loads(content)
    pre_tokenizer = tokenizer.get("pre_tokenizer") or {}
    if (
        pre_tokenizer.get("type") != "Metaspace"
        or pre_tokenizer.get("split", True)
        or tokenizer.get("normalizer")
    ):
        return content
    pieces = json.dumps(sorted(tokenizer["model"]["vocab"].items())).encode()
    if hashlib.sha256(pieces).hexdigest() != LLAMA2_VOCAB_SHA256:
        return content
    tokenizer |= {"normalizer": DUMMY_PREFIX, "pre_tokenizer": None}
    return json.dumps(tokenizer, ensure_ascii=False)


def all_merges(ranked: Mapping[str, float], vocab: dict[str, int]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, sorted by the rank of that piece, then the ids of the pair."""
    found = []
    if any(len(piece) > LONGEST_PIECE for piece in ranked):
        raise ValueError(f"a piece has more than {LONGEST_PIECE:,} characters")
    for piece, rank in ranked.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranked and right in ranked:
                found.append((rank, vocab[left], vocab[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: the character of this code if it is printable, else the next from 256."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printing}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(printing)))
    return letters
