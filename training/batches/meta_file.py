"""Checks whether a dataset's meta.json can be true, and whether a token file holds token ids. A dataset may
come from anybody: no file name in meta.json may lead out of its folder, and a meta.pkl, which it may contain,
is never read.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from common.errors import UserError
from training.configuration.dataset_name import is_plain_name

FORMAT = 1  # the value that data/pipeline/meta_file.py writes; a meta.json written by hand has none
# The first bytes of other kinds of files. Read as token ids, such a file would pass for text.
OTHER_FILES = {
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"PK\x03\x04": "a zip archive (.npz, .pt)",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"PAR1": "a parquet file",
    (20240520).to_bytes(
        4, "little"
    ): "a token file with a header (llm.c), whose first 1,024 bytes are no tokens",
}


def check_meta(path: Path, meta: dict) -> None:
    """Raises UserError that names the wrong field."""
    vocab_size, eot_id = int(meta["vocab_size"]), meta.get("eot_id")
    if meta.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"{path} has format {meta['format']!r}, this code reads {FORMAT}; run its prepare.py again"
        )
    if vocab_size < 1:
        raise _impossible(path, f"vocab_size {vocab_size}")
    if eot_id is not None and not (type(eot_id) is int and 0 <= eot_id < vocab_size):
        raise _impossible(path, f"eot_id {eot_id!r} with a vocabulary of {vocab_size}")
    for name, recorded in meta["files"].items():
        tokens, sha256 = recorded.get("tokens"), recorded.get("sha256")
        if not is_plain_name(name):
            raise _impossible(path, f"the file name {name!r}, which leads out of the folder")
        if not (tokens is None or type(tokens) is int and tokens >= 0):
            raise _impossible(path, f"{tokens!r} tokens in {name}")
        if not (sha256 is None or isinstance(sha256, str)):
            raise _impossible(path, f"a sha256 of {name} that is {sha256!r}")
    tokenizer = meta.get("tokenizer")
    if isinstance(tokenizer, dict) and "file" in tokenizer:
        _check_tokenizer(path, tokenizer)


def _impossible(path: Path, what: str) -> UserError:
    return UserError(f"{path} says {what}; run the dataset's prepare.py again, or correct it")


def _check_tokenizer(path: Path, tokenizer: dict) -> None:
    """The tokenizer file beside the tokens must be the one that made them: sample.py decodes with it."""
    if not is_plain_name(tokenizer["file"]):
        raise _impossible(path, f"the tokenizer file {tokenizer['file']!r}, which leads out of the folder")
    file = path.with_name(tokenizer["file"])
    if not file.is_file():
        return  # training does not need it; sample.py will ask for it
    sha256, recorded = hashlib.sha256(file.read_bytes()).hexdigest(), tokenizer.get("sha256")
    if recorded not in (None, sha256):
        raise UserError(
            f"{file} (sha256 {sha256[:12]}...) is not the tokenizer that made the tokens "
            f"({str(recorded)[:12]}...); put the file back, or run the dataset's prepare.py again"
        )


def check_is_tokens(path: Path) -> None:
    """Checks a file whose hash meta.json does not record. Raises UserError."""
    with open(path, "rb") as file:
        begin = file.read(8)
    for magic, kind in OTHER_FILES.items():
        if begin.startswith(magic):
            raise UserError(
                f"{path} is {kind}, not flat token ids; data/text/prepare.py makes them from text"
            )
