"""A tokenizer whose tokens are the characters of one text."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from common.errors import UserError


class CharTokenizer:
    def __init__(self, chars: str):
        self.chars = chars
        self.ids = {char: i for i, char in enumerate(chars)}
        self.vocab_size = len(chars)
        self.meta: dict[str, Any] = {"kind": "char", "name": "char", "chars": chars}

    def encode(self, text: str) -> list[int]:
        try:
            return [self.ids[char] for char in text]
        except KeyError as error:
            raise UserError(
                f"character {error.args[0]!r} is not one of this dataset's {self.vocab_size}; leave it out"
            ) from None

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids if i < self.vocab_size)

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)
