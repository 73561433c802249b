"""One of the tokenizers that the tiktoken library knows by name, such as gpt2."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from common.errors import UserError
from data.huggingface import why_no_download

if TYPE_CHECKING:
    import tiktoken


class EncodeError(Exception):
    """A text that the tokenizer's library cannot encode."""


def tiktoken_ids(encoding: "tiktoken.Encoding", text: str) -> np.ndarray:
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except BaseException as error:
        # The library's regular expressions overflow on a million spaces, with a panic, which is no Exception.
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            can = "a tokenizer.json with the same ids can; GPT-2's: --tokenizer=hf:openai-community/gpt2"
            raise EncodeError(f"tiktoken cannot encode it ({error}); {can}") from None
        raise


class TiktokenTokenizer:
    def __init__(self, name: str):
        try:
            import tiktoken
        except ImportError:
            raise UserError(f"the {name!r} tokenizer needs tiktoken: pip install tiktoken") from None
        if name not in tiktoken.list_encoding_names():
            raise UserError(
                f"no tokenizer {name!r}: not a tokenizer.json, not a folder that holds one, and not one of "
                f"tiktoken's, which are {', '.join(tiktoken.list_encoding_names())}"
            )
        try:
            self.encoding = tiktoken.get_encoding(name)
        except OSError as error:  # the errors of requests are OSErrors too
            set_now = os.environ.get("TIKTOKEN_CACHE_DIR", "not set")
            raise UserError(
                f"tiktoken could not download its {name!r} files {why_no_download(error)}. Without a "
                "network: load it once on a machine that has one, with TIKTOKEN_CACHE_DIR=FOLDER in the "
                f"environment; copy FOLDER here and set TIKTOKEN_CACHE_DIR to it (now: {set_now})"
            ) from error
        self.vocab_size = self.encoding.n_vocab
        self.meta: dict[str, Any] = {"kind": "tiktoken", "name": name}

    def encode(self, text: str) -> list[int]:
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [tiktoken_ids(self.encoding, text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return self.encoding.decode([int(i) for i in ids if i < self.vocab_size])

    def token_id(self, token: str) -> int | None:
        try:
            return self.encoding.encode_single_token(token)
        except KeyError:
            return None
