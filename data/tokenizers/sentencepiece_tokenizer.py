"""The tokenizer of a tokenizer.model, by the sentencepiece library, whose ids are right by definition.

Control tokens such as </s> that a text spells are encoded as ordinary text. The trap: who reads a Hugging
Face folder needs a tokenizer.json, and transformers 5.24 makes one of LLaMA 2's file that merges spaces in
another order. as_json is one with the library's ids, and its hash is that of datasets from before, too.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from data.tokenizers.files_beside import check_files_beside
from data.tokenizers.json_file import DUMMY_PREFIX, SPACE, added_token, read_file

LONGEST_PIECE = 10_000  # characters; finding its merges takes time by the square of them
SPACES = ["", " ", "   ", " a  b\n  c \n\n", f"{SPACE}a {SPACE} {SPACE}", "e\u0301 \ufb01 12\t\U0001f642"]


class SentencePieceTokenizer:
    file_name = "tokenizer.model"  # in the folder of a dataset

    def __init__(self, path: str | Path):
        try:
            import sentencepiece
        except ImportError:
            raise UserError(f"{path} needs the sentencepiece library: pip install sentencepiece") from None
        path = Path(path)
        self.content = content = read_file(path)
        try:
            if not content:  # which the library takes for no file
                raise ValueError("it is empty")
            self.model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} is not a SentencePiece model that can be read: {error}; that of LLaMA 3 is none: "
                "take the tokenizer.json, which transformers saves"
            ) from None
        self.vocab_size: int = self.model.vocab_size()
        check_files_beside(path, self.token_id)
        self.meta: dict[str, Any] = {"kind": "sentencepiece", "name": path.resolve().parent.name}
        self.meta |= {"file": str(path), "file_sha256": hashlib.sha256(content).hexdigest()}

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text)

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(self.model.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Control tokens such as </s> as their names, which the library leaves out."""
        runs = itertools.groupby((int(i) for i in ids if i < self.vocab_size), self._is_special)
        return "".join(
            "".join(map(self.model.id_to_piece, run)) if special else self.model.decode(list(run))
            for special, run in runs
        )

    def token_id(self, token: str) -> int | None:
        number = self.model.piece_to_id(token)
        return number if self.model.id_to_piece(number) == token else None

    def _is_special(self, i: int) -> bool:
        return self.model.is_control(i) or self.model.is_unknown(i)

    @cached_property
    def as_json(self) -> str | None:
        """The content of a tokenizer.json that gives the same ids; None if there is none."""
        if any(len(self.model.id_to_piece(i)) > LONGEST_PIECE for i in range(self.vocab_size)):
            return None
        settings = itertools.product((True, False), (False, True))
        return next((made for each in settings if self._is_equal(made := _convert(self.model, *each))), None)

    def _is_equal(self, content: str) -> bool:
        """Compares the ids of texts with spaces everywhere, and of every piece inside a text."""
        from tokenizers import Tokenizer

        pieces = [self.model.id_to_piece(i).replace(SPACE, " ") for i in range(self.vocab_size)]
        try:
            library = Tokenizer.from_str(content)
            library.encode_special_tokens = True
            for texts in (SPACES, [f"x{piece}y" for piece in pieces]):
                made = library.encode_batch_fast(texts, add_special_tokens=False)
                if any(self.encode(text) != ids.ids for text, ids in zip(texts, made, strict=True)):
                    return False
        except Exception:  # the library raises no other class
            return False
        return True


def _convert(model: Any, dummy_prefix: bool, strip_spaces: bool) -> str:
    """A tokenizer.json of a BPE with byte_fallback. It lists merges, the model only pieces and their ranks: a
    piece can be merged from every pair of pieces that together have its text. The merge gets the rank of its
    result. The idea is that of convert_slow_tokenizer.py in Hugging Face transformers."""
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    special = [i for i in range(len(pieces)) if model.is_unknown(i) or model.is_control(i)]
    ranks = {
        piece: -model.get_score(i)
        for i, piece in enumerate(pieces)
        if i not in special and not model.is_byte(i) and not model.is_unused(i)
    }
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if dummy_prefix else []
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    made = {
        "version": "1.0",
        "added_tokens": [added_token(i, pieces[i]) for i in special],
        "normalizer": _normalizer(dummy_prefix, strip_spaces),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": pieces[model.unk_id()],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": all_merges(ranks, vocab),
        },
    }
    return json.dumps(made, ensure_ascii=False)


def _normalizer(dummy_prefix: bool, strip_spaces: bool) -> dict[str, Any]:
    """DUMMY_PREFIX is add_dummy_prefix without remove_extra_whitespaces. That setting removes spaces at both
    ends, and at the end also characters like SPACE of the text itself."""
    prefix, replace = DUMMY_PREFIX["normalizers"]
    first, second, last = (
        {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
        for pattern, content in ((r"\A +", ""), (" {2,}", " "), (rf"{SPACE}+\z", ""))
    )
    steps = [prefix, replace] if dummy_prefix else [replace]
    return {"type": "Sequence", "normalizers": [first, second, *steps, last] if strip_spaces else steps}


def all_merges(ranks: Mapping[str, float], vocab: Mapping[str, int]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, sorted by the rank of that piece, then the ids of the pair."""
    found = []
    for piece, rank in ranks.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks:
                found.append((rank, vocab[left], vocab[right], left, right))
    return [[left, right] for *_, left, right in sorted(found)]
