"""Whether a tokenizer is the one that a model was trained with: one comparison and one message for sampling,
evaluating and exporting, by the ids of a text. A training run compares hashes (tokenizer_hash.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from data.pipeline.dataset_tokenizer import load_tokenizer, names_tokenizer
from data.pipeline.meta_file import read_meta
from data.pipeline.token_files import SPLITS, stored_dtype, token_file_names
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tiktoken_tokenizer import EncodeError
from data.tokenizers.tokenizer import Tokenizer, hash_tokenizer
from training.batches.sources import same_tokenizer, show_tokenizer, tokenizer_identity

COMPARED_TOKENS = 10_000  # of a dataset whose tokenizer may be the model's in another form


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """As a checkpoint records it."""
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer_identity(tokenizer.meta)["sha256"]
    return hash_tokenizer(tokenizer)  # type: ignore[arg-type]  # every other kind


def check_recorded(trained: dict[str, Any], model: str, found: dict[str, Any], where: str, fix: str) -> None:
    """`trained`: what the checkpoint `model` records of its tokenizer, `found`: what is known of that of
    `where`; each a name and a sha256. Raises UserError."""
    if same_tokenizer(trained, found) is False:
        raise _another(trained, model, found, where, fix)


def check_dataset(tokenizer: Tokenizer, model: str, dataset: Path, fix: str) -> None:
    """Raises UserError if the tokens of the dataset are of another tokenizer than this one of `model`."""
    if not is_tokenizer_of(tokenizer, dataset):
        trained = {"name": tokenizer.meta["name"], "sha256": tokenizer_hash(tokenizer)}
        found = tokenizer_identity(read_meta(dataset)["tokenizer"] or {})
        raise _another(trained, model, found, str(dataset), fix)


def is_tokenizer_of(tokenizer: Tokenizer, dataset: Path) -> bool:
    """Whether it made the tokens of the dataset, as far as that can be known. One tokenizer may be stored in
    two forms, of other hashes, so the ids of a text are compared, too. Raises UserError."""
    meta = read_meta(dataset)
    sha256 = tokenizer_identity(meta["tokenizer"] or {})["sha256"]
    files = [name for split in reversed(SPLITS) for name in token_file_names(dataset, split)]
    unknown = not files or sha256 is None and not names_tokenizer(meta["tokenizer"])
    if unknown or sha256 == tokenizer_hash(tokenizer):
        return True
    theirs = load_tokenizer(dataset)
    ids = np.fromfile(dataset / files[0], stored_dtype(meta["dtype"]), COMPARED_TOKENS)
    text = theirs.decode(ids[ids != meta["eot_id"]].tolist())
    try:
        return tokenizer.encode(text) == theirs.encode(text)
    except (EncodeError, UserError):  # a character that one of them does not have
        return False


def _another(trained: dict[str, Any], model: str, found: dict[str, Any], where: str, fix: str) -> UserError:
    return UserError(
        f"{where} has the tokenizer {show_tokenizer(found)}, and {model} has {show_tokenizer(trained)}: the "
        f"same ids would be other text; {fix}"
    )


def check_rows(tokenizer: Tokenizer, rows: int, model: str, fix: str) -> None:
    """Raises UserError if ordinary tokens of the tokenizer have no row in the embedding of the model. Added
    ones beyond the last row, such as a padding token, do no harm until a text is encoded to them."""
    ids = tokenizer.vocab_size
    if isinstance(tokenizer, FileTokenizer):
        ids = max(tokenizer.tokenizer.get_vocab(with_added_tokens=False).values(), default=0) + 1
    if ids > rows:
        raise UserError(
            f"the tokenizer {tokenizer.meta['name']!r} has {ids:,} ids, {model} {rows:,}; one of them is "
            f"from another model; {fix}"
        )
