"""What the files of a tokenizer say, read without a tokenizer library: a training run compares no more.

Here is also the one correction of a tokenizer.json that a library wrote wrong (restore_prefix).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_regular

MOST_BYTES = 1 << 28  # of a tokenizer's file; those of the largest vocabularies have a tenth of it
SPACE = "\u2581"  # SentencePiece's letter for a space
DUMMY_PREFIX: dict[str, Any] = {  # SentencePiece's name for the space that it puts before every text
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ],
}
LLAMA2_VOCAB_SHA256 = "77149dcd1714a5c3c732407f8a6be1cb82c1d6058f0896c6cf420a5768877566"


def read_file(path: str | Path) -> bytes:
    """The content of a tokenizer's file. Raises UserError."""
    try:
        return read_regular(Path(path), MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no tokenizer that can be read: {error}") from None


def file_hash(path: str | Path) -> str:
    """The sha256 of a tokenizer's file. Raises UserError."""
    return hashlib.sha256(read_file(path)).hexdigest()


def tokenizer_json(path: str | Path) -> str:
    """The content of a tokenizer.json. Raises UserError."""
    try:
        return restore_prefix(read_file(path).decode("utf-8-sig"))  # read_text would change the line ends
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from None


def restore_prefix(content: str) -> str:
    """Puts SentencePiece's space before every text back into a tokenizer.json of LLaMA 2 that lacks it; any
    other content is returned as it is.

    transformers 5 saves a pre-tokenizer that leaves this space out before a text that begins with a space.
    """
    if '"Metaspace"' not in content:
        return content
    tokenizer = json.loads(content)
    cuts = tokenizer.get("pre_tokenizer") or {}
    if cuts.get("type") != "Metaspace" or cuts.get("split", True) or tokenizer.get("normalizer"):
        return content
    pieces = json.dumps(sorted(tokenizer["model"]["vocab"].items())).encode()
    if hashlib.sha256(pieces).hexdigest() != LLAMA2_VOCAB_SHA256:
        return content
    tokenizer |= {"normalizer": DUMMY_PREFIX, "pre_tokenizer": None}
    return json.dumps(tokenizer, ensure_ascii=False)


def added_token(number: int, content: str, special: bool = True) -> dict[str, Any]:
    """As a tokenizer.json lists it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": special, **flags}


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: the character of this code if it is printable, else the next from 256."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printing}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(printing)))
    return letters
