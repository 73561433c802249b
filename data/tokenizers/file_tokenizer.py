"""The tokenizer of a Hugging Face model, from its tokenizer.json.

Added tokens that the file marks "special": true are encoded as ordinary text. Those that it marks false are
vocabulary like any other and keep their ids: the runs of spaces of GPT-NeoX, but also <think> of Qwen3.

The ids are those of the tokenizers library. fastokens makes the same ones many times as fast, but it is
young: the first texts of each process, and then one in CHECKED_EVERY, are encoded by both. Other ids are an
error: if a worker went on with the other library, the bytes would depend on who encodes which document.
"""

import multiprocessing
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from data.tokenizers.files_beside import check_files_beside
from data.tokenizers.json_file import tokenizer_json

CHECKED_FIRST, CHECKED_EVERY = 16, 256  # texts


def raise_other(error: BaseException) -> None:
    """Unless a library in Rust has raised it: plain Exception, or a panic, which is none."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


def use_fastokens(tokenizer: Any) -> bool:
    """Lets fastokens make the ids of a tokenizer.json, if it is installed and can; one line says so. Of a
    tokenizer of another kind, returns False."""
    if not isinstance(tokenizer, FileTokenizer):
        return False
    if is_worker := multiprocessing.parent_process() is not None:
        os.environ |= {"RAYON_NUM_THREADS": "1", "FASTOKENS_BPE_THREADS": "1"}  # each worker has one core
    encoder = f"fastokens; the first texts, and one in {CHECKED_EVERY}, also by tokenizers, to compare them"
    try:
        import fastokens

        tokenizer.fast = fastokens.Tokenizer.from_json_str(tokenizer.tokenizer.to_str())
    except ImportError:
        install = "pip install -r requirements/data.txt"
        encoder = f"tokenizers; fastokens makes the same many times as fast: {install}"
    except BaseException as error:
        raise_other(error)
        encoder = f"tokenizers, as fastokens cannot read this tokenizer.json ({error})"
    if not is_worker:
        print(f"ids are made by {encoder}")
    return tokenizer.fast is not None


class FileTokenizer:
    file_name = "tokenizer.json"  # in the folder of a dataset

    def __init__(self, path: str | Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError(f"{path} needs the tokenizers library: pip install tokenizers") from None
        path, content = Path(path), tokenizer_json(path)
        try:
            self.tokenizer = Tokenizer.from_str(content)
            self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        except BaseException as error:
            raise_other(error)
            raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from error
        added = {token.content: i for i, token in self.tokenizer.get_added_tokens_decoder().items()}
        check_files_beside(path, added.get, content)
        if dropout := getattr(self.tokenizer.model, "dropout", None):
            self.tokenizer.model.dropout = None
            if multiprocessing.parent_process() is None:  # workers need not repeat it
                print(f"BPE dropout ({dropout:g}) of {path} is off: the same text always gets the same ids")
        self.tokenizer.encode_special_tokens = True  # in spite of its name: encode them as ordinary text
        self.tokenizer.no_truncation()  # a length limit in the file would drop the rest of each document
        self.tokenizer.no_padding()
        self.content = content.encode()
        self.fast: Any = None  # the same tokenizer in fastokens
        self.encoded = 0  # texts
        name = path.resolve().parent.name
        self.meta: dict[str, Any] = {"kind": "tokenizers", "name": name, "file": str(path)}

    def encode(self, text: str) -> list[int]:
        return self.encode_arrays([text])[0].tolist()

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        arrays = self._by_fastokens(texts)
        if arrays is None:
            return self._by_tokenizers(texts)
        first, self.encoded = self.encoded, self.encoded + len(texts)
        numbers = range(first, self.encoded)
        checked = [i - first for i in numbers if i < CHECKED_FIRST or i % CHECKED_EVERY == 0]
        for i, ids in zip(checked, self._by_tokenizers([texts[i] for i in checked]), strict=True):
            if not np.array_equal(arrays[i], ids):
                raise UserError(
                    f"fastokens and tokenizers make different ids of the text {texts[i]!r:.80} by "
                    f"{self.meta['file']}; run pip uninstall fastokens, then prepare again with --no-resume"
                )
        return arrays

    def _by_fastokens(self, texts: list[str]) -> list[np.ndarray] | None:
        if self.fast is None or not texts:
            return None
        try:
            ids, starts = self.fast.encode_batch_flat(texts, split_special_tokens=True)
        except BaseException as error:  # the tokenizers library says what is wrong with a text
            raise_other(error)
            return None
        return np.split(np.frombuffer(ids, "<u4"), np.frombuffer(starts, "<u8")[1:-1].astype(np.int64))

    def _by_tokenizers(self, texts: list[str]) -> list[np.ndarray]:
        # "fast" in the library's method: it does not compute where in the text each token stands
        try:
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        except Exception as error:  # the library raises no other class, for example for an unknown character
            raise UserError(f"the tokenizer {self.meta['file']} cannot encode this text: {error}") from None
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)
