"""meta.json: what the token files of a dataset are.

It is written last, so a folder that has a meta.json holds a complete dataset. A dataset may come from
anybody: every field is checked, no file name in it may lead out of its folder, and a meta.pkl, which a
dataset may contain, is never read.
"""

import os
import pickle
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_file import read_json
from data.folders import how_to_make, is_plain_name
from data.pipeline import token_files
from data.pipeline.token_files import DTYPES, SPLITS, UINT16_IDS, is_count, is_hash, is_of_split

FORMAT = 1  # of meta.json; a reader refuses the formats that it does not know
LENGTHS_FORMAT = 2  # the same, and each token file has a file of document lengths beside it
MOST_BYTES = 1 << 28  # of a meta.json: it has about 150 bytes for each token file
MOST_IDS = 1 << 32  # of a vocabulary: ids have at most four bytes
# For token files of nanoGPT's data/openwebtext; what it leaves out is found when the files are read.
NANOGPT = '{"dtype": "uint16", "vocab_size": 50257, "eot_id": 50256, "tokenizer": "gpt2"}'


def describe(vocab_size: int, tokenizer: dict, eot_id: int | None, source: str, files: dict) -> dict:
    """What meta.json holds. tokenizer is the .meta of one; files is {name: what its TokenWriter counted}."""
    return {
        "format": LENGTHS_FORMAT if any("lengths" in file for file in files.values()) else FORMAT,
        "dtype": token_files.smallest_dtype(vocab_size),
        "vocab_size": vocab_size,
        "eot_id": eot_id,
        "tokenizer": tokenizer,
        "source": source,
        "files": files,
    }


def nanogpt_meta(vocab_size: int, tokenizer: dict) -> bytes:
    """The content of meta.pkl, which nanoGPT's programs read. Ours never do: a pickle can run any code."""
    meta: dict[str, Any] = {"vocab_size": vocab_size}
    if tokenizer["kind"] == "char":
        chars = tokenizer["chars"]
        meta["itos"] = dict(enumerate(chars))
        meta["stoi"] = {c: i for i, c in enumerate(chars)}
    return pickle.dumps(meta)


def read_meta(folder: str | Path) -> dict:
    """The checked meta.json of a dataset folder: the one reader of training and of every other command. What
    one written by hand leaves out is added: the tokens of each file, a tokenizer of None, an eot_id of None.
    Raises UserError."""
    folder = Path(folder)
    path = folder / "meta.json"
    if not os.path.lexists(path):
        raise UserError(_missing(folder, path))
    try:
        meta = read_json(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); {how_to_make(folder)}") from None
    version = meta.get("format", FORMAT)
    if type(version) is not int or version not in (FORMAT, LENGTHS_FORMAT):
        raise UserError(
            f"{path} has format {version!r:.80}, this code reads {FORMAT} and {LENGTHS_FORMAT}; run its "
            "prepare.py again"
        )
    if wrong := _wrong_meta(meta):
        raise UserError(f"{path} says {wrong}; run the dataset's prepare.py again, or correct it")
    tokenizer = meta.get("tokenizer")
    if isinstance(tokenizer, str):
        tokenizer = {"kind": "tiktoken", "name": tokenizer}
    added = {"eot_id": meta.get("eot_id"), "source": meta.get("source") or "an unknown source"}
    return meta | added | {"tokenizer": tokenizer, "files": _files(folder, meta)}


def _missing(folder: Path, path: Path) -> str:
    found = any(token_files.token_file_names(folder, split) for split in SPLITS)
    found = found and not (folder / "plan.json").exists()  # of a prepare.py, which has not finished
    by_hand = f". For token files of nanoGPT in GPT-2's tokens: echo '{NANOGPT}' > {shlex.quote(str(path))}"
    return (
        f"no {path}, which says how the tokens are stored, so {folder} holds no complete dataset; "
        f"{how_to_make(folder)}{by_hand * found}"
    )


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def wrong_field(
    where: str, fields: object, possible: Mapping[str, Callable[[Any], Any]], needed: Iterable[str] = ()
) -> str | None:
    """What is impossible in an object: the first field that is there, or needed, and not possible; None if
    nothing is. A null counts as a field that is not there."""
    if not isinstance(fields, dict):
        return f"{fields!r:.80}{where}"
    for name, is_possible in possible.items():
        if not (is_possible(fields[name]) if fields.get(name) is not None else name not in needed):
            return f"{name} {fields.get(name)!r:.80}{where}"
    return None


def _wrong_meta(meta: dict) -> str | None:
    vocab_size: Any = meta.get("vocab_size")
    possible = {
        "vocab_size": lambda value: value and is_count(value, MOST_IDS),
        "dtype": lambda value: value in DTYPES and (value != "uint16" or vocab_size <= UINT16_IDS),
        "eot_id": lambda value: is_count(value, vocab_size - 1),
        "source": is_text,
        "files": lambda value: isinstance(value, dict),
        **dict.fromkeys(("documents", "empty", "bad", "cut", "too_long", "targets"), is_count),
    }
    where = f" with a vocabulary of {vocab_size!r:.80}"
    if wrong := wrong_field(where, meta, possible, ("vocab_size", "dtype")):
        of_dtypes = f"; it is one of {', '.join(DTYPES)}, and ids above 65535 do not fit in uint16"
        return wrong + of_dtypes * wrong.startswith("dtype")
    for name, file in (meta.get("files") or {}).items():
        if wrong := wrong_token_file(name, file):
            return wrong
        if ("lengths" in file) != (meta.get("format") == LENGTHS_FORMAT):
            return f"format {meta.get('format')}, in which {name} has no such entry for document lengths"
    tokenizer = meta.get("tokenizer") or {}
    if isinstance(tokenizer, str):
        return None
    texts = dict.fromkeys(("kind", "name", "chars", "sha256", "file_sha256"), is_text)
    return wrong_field(" of the tokenizer", tokenizer, texts | {"file": is_plain_name})


def wrong_token_file(name: str, file: object, needed: Iterable[str] = ()) -> str | None:
    """What is impossible in what a meta.json or a manifest says of one token file; None if nothing is."""
    if not is_plain_name(name):
        return f"the file name {name!r:.80}, which leads out of the folder"
    possible = {"tokens": is_count, "max_id": lambda value: is_count(value, MOST_IDS - 1), "sha256": is_hash}
    wrong = wrong_field(f" of {name}", file, possible, needed)
    if wrong or not isinstance(file, dict) or "lengths" not in file:
        return wrong
    tokens = file.get("tokens") or 0
    lengths = {
        "documents": lambda value: is_count(value, tokens),
        "longest": lambda value: is_count(value, min(tokens, token_files.MOST_LENGTH)),
        "sha256": is_hash,
    }
    where = f" in the lengths of {name}, which has {tokens:,} tokens"
    return wrong_field(where, file["lengths"], lengths, lengths)


def _files(folder: Path, meta: dict) -> dict[str, dict]:
    """What meta.json says of the token files, with their tokens."""
    names = [name for split in SPLITS for name in token_files.token_file_names(folder, split)]
    files: dict[str, dict] = {}
    for name, said in (meta.get("files") or {name: {} for name in names}).items():
        path, itemsize = folder / name, token_files.stored_dtype(meta["dtype"]).itemsize
        files[name] = {key: value for key, value in said.items() if value is not None}
        if "tokens" not in files[name]:
            files[name]["tokens"] = path.stat().st_size // itemsize if path.is_file() else 0
    return files


def count_tokens(meta: dict) -> dict[str, int]:
    """Tokens of each split, over all of its files."""
    return {
        split: sum(file["tokens"] for name, file in meta["files"].items() if is_of_split(name, split))
        for split in SPLITS
    }


def document_ends(meta: dict) -> str:
    """How the end of a document is known."""
    if meta.get("format") == LENGTHS_FORMAT:
        return f"{sum(file['lengths']['documents'] for file in meta['files'].values()):,} documents by length"
    return f"end-of-text id {meta['eot_id']}"
