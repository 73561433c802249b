"""A tokenizer of any kind: what every kind offers, and how one is opened.

A user names it (a file, a folder, a name of tiktoken's, hf:OWNER/NAME), or the meta.json of a dataset says
which one made its tokens. In every kind, special tokens that appear inside a document are encoded as ordinary
text, so a document that contains '<|endoftext|>' never holds the end-of-text id. An id past the vocabulary
(models pad theirs) decodes to nothing.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from common.durable_file import write_bytes
from common.errors import UserError
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.json_file import file_hash
from data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer

HUB_PREFIX = "hf:"  # --tokenizer hf:OWNER/NAME


class Tokenizer(Protocol):
    vocab_size: int
    meta: dict[str, Any]  # what meta.json records of it

    def encode(self, text: str) -> list[int]: ...
    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def token_id(self, token: str) -> int | None: ...


SubwordTokenizer = TiktokenTokenizer | FileTokenizer | SentencePieceTokenizer
# {kind in meta.json: class}
OF_FILES: dict[str, type[FileTokenizer] | type[SentencePieceTokenizer]] = {
    "tokenizers": FileTokenizer,
    "sentencepiece": SentencePieceTokenizer,
}

# --- by the name that a user gives ---


def open_tokenizer(name: str) -> SubwordTokenizer:
    """name: a tokenizer.json or .model, a folder that holds one (also hf:FOLDER), or a name of tiktoken's."""
    local = str(name).removeprefix(HUB_PREFIX)
    if not local:
        raise UserError("--tokenizer is empty; name a tokenizer, such as gpt2, or a tokenizer.json")
    path = Path(local).expanduser()
    for file in (path / "tokenizer.json", path / "tokenizer.model", path):
        if file.is_file():
            return SentencePieceTokenizer(file) if file.suffix == ".model" else FileTokenizer(file)
    if path.is_dir():
        raise UserError(
            f"{path} holds no tokenizer.json or tokenizer.model; AutoTokenizer.from_pretrained(...)"
            f".save_pretrained({str(path)!r}) of transformers writes a tokenizer.json, also from vocab.json"
        )
    return TiktokenTokenizer(name)


# --- by what meta.json records ---


def open_recorded_tokenizer(recorded: dict[str, Any], folder: str | Path) -> CharTokenizer | SubwordTokenizer:
    """recorded: what the meta.json of the dataset in this folder says of its tokenizer, if
    names_tokenizer() says that it is enough."""
    if recorded["kind"] == "char":
        return CharTokenizer(recorded["chars"])
    if recorded["kind"] == "tiktoken":
        return TiktokenTokenizer(recorded["name"])
    path = Path(folder) / recorded["file"]
    if not path.is_file() or file_hash(path) != recorded.get("file_sha256", recorded["sha256"]):
        state = "has changed since" if path.is_file() else "is gone, but"
        raise UserError(
            f"{path} {state} the tokens were made with it; put the file back, or run prepare.py again"
        )
    return OF_FILES[recorded["kind"]](path)


def keep_tokenizer(folder: Path, tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """What meta.json records of the tokenizer. Its file, if it has one, is copied into the folder."""
    meta = {**tokenizer.meta, "sha256": hash_tokenizer(tokenizer)}
    if isinstance(tokenizer, FileTokenizer | SentencePieceTokenizer):
        meta["file"] = tokenizer.file_name
        write_bytes(folder / tokenizer.file_name, tokenizer.content)
    return meta


def hash_tokenizer(tokenizer: SubwordTokenizer) -> str:
    """The hash of its tokenizer.json, also of the one that says the same as a tokenizer.model; else that of
    the model file, or of all the tokens of an encoding of tiktoken's."""
    if isinstance(tokenizer, TiktokenTokenizer):
        vocabulary = tokenizer.encoding.token_byte_values()
        content = b"".join(len(token).to_bytes(4, "big") + token for token in vocabulary)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        content = (tokenizer.as_json or "").encode() or tokenizer.content
    else:
        content = tokenizer.content
    return hashlib.sha256(content).hexdigest()
