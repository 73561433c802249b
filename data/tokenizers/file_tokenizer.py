"""The tokenizer of a Hugging Face model, from its tokenizer.json or from the files that one can be made of.

Added tokens that the file marks "special": true are encoded as ordinary text. Those that it marks false are
vocabulary like any other and keep their ids: the runs of spaces of GPT-NeoX, but also <think> of Qwen3.
"""

import multiprocessing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from data.tokenizers import model_file
from data.tokenizers.added_tokens import add_tokens_beside


def tokenizer_json(path: str | Path) -> str:
    """The content of a tokenizer.json, with the added tokens of the files beside it; if the path is a
    tokenizer.model, made from that. Raises UserError."""
    path = Path(path)
    if path.suffix == ".model":
        content = model_file.convert(path)
    else:
        content = model_file.read_file(path).decode("utf-8-sig")  # read_text would change the line ends
        content = model_file.restore_prefix(content)
    try:
        return add_tokens_beside(content, path.parent)
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise UserError(f"{path} and the files beside it cannot be read as one tokenizer: {error}") from None


class FileTokenizer:
    # another way to the same ids, set by use_fast_encoder() of fast_encoder.py; its None leaves a text to the
    # library
    fast: Callable[[str], np.ndarray | None] | None = None

    def __init__(self, path: str | Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(f"{path} needs the tokenizers library: pip install tokenizers") from None
        path = Path(path)
        try:
            self.tokenizer = Tokenizer.from_str(tokenizer_json(path))
            self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        except UserError:
            raise
        except BaseException as error:  # the library raises plain Exception, or a panic, which is none
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from error
        dropout = getattr(self.tokenizer.model, "dropout", None)
        if dropout:
            self.tokenizer.model.dropout = None
            if multiprocessing.parent_process() is None:  # workers need not repeat it
                print(f"BPE dropout ({dropout:g}) of {path} is off: the same text always gets the same ids")
        self.tokenizer.encode_special_tokens = True  # in spite of its name: encode them as ordinary text
        self.tokenizer.no_truncation()  # a length limit in the file would drop the rest of each document
        self.tokenizer.no_padding()
        self.meta: dict[str, Any] = {
            "kind": "tokenizers",
            "name": path.resolve().parent.name,
            "file": str(path),
        }

    def encode(self, text: str) -> list[int]:
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        arrays = [None if self.fast is None else self.fast(text) for text in texts]
        left = [text for text, ids in zip(texts, arrays, strict=True) if ids is None]
        # "fast" in the library's method: it does not compute where in the text each token stands
        try:
            encodings = iter(self.tokenizer.encode_batch_fast(left, add_special_tokens=False) if left else [])
        except Exception as error:  # the library raises no other class, for example for an unknown character
            raise UserError(f"the tokenizer {self.meta['file']} cannot encode this text: {error}") from None
        return [np.array(next(encodings).ids, dtype=np.uint32) if ids is None else ids for ids in arrays]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)
