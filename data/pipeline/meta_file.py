"""meta.json: what the token files of a dataset are.

It is written last, so a folder that has a meta.json holds a complete dataset.
"""

import json
import os
import pickle
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.folders import dataset_argument
from data.pipeline.token_files import SPLITS, smallest_dtype, stored_dtype
from data.tokenizers.tokenizer import Tokenizer, open_recorded_tokenizer

FORMAT = 1  # of meta.json; a reader refuses the formats that it does not know


def describe(vocab_size: int, tokenizer: dict, eot_id: int | None, source: str, files: dict) -> dict:
    """What meta.json holds. tokenizer is the .meta of one; files is {name: what its TokenWriter counted}."""
    return {
        "format": FORMAT,
        "dtype": smallest_dtype(vocab_size),
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
    """The checked meta.json of a dataset folder. What one written by hand leaves out is added: the tokens of
    each file, a tokenizer of None, an eot_id of None."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist, so {folder} holds no complete dataset; run its prepare.py")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); run its prepare.py again") from error
    if not isinstance(meta, dict):
        raise UserError(f"{path} is not a JSON object; run its prepare.py again")
    if meta.get("format", FORMAT) != FORMAT:
        raise UserError(
            f"{path} has format {meta.get('format')!r}, this code reads {FORMAT}; run its prepare.py"
        )
    if meta.get("dtype") not in ("uint16", "uint32"):
        raise UserError(f"{path}: dtype {meta.get('dtype')!r} is not uint16 or uint32")
    try:
        vocab_size = int(meta["vocab_size"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{path}: vocab_size {meta.get('vocab_size')!r} is not a number") from None
    tokenizer = meta.get("tokenizer")
    if isinstance(tokenizer, str):
        tokenizer = {"kind": "tiktoken", "name": tokenizer}
    return {
        **meta,
        "vocab_size": vocab_size,
        "eot_id": meta.get("eot_id"),
        "tokenizer": tokenizer,
        "source": meta.get("source", "an unknown source"),
        "files": _files(path, meta),
    }


def _files(path: Path, meta: dict) -> dict[str, dict]:
    """What meta.json says of the token files, with their tokens."""
    recorded = meta.get("files") or {
        file.name: {} for split in SPLITS for file in sorted(path.parent.glob(f"{split}*.bin"))
    }
    itemsize, files = stored_dtype(meta["dtype"]).itemsize, {}
    if not isinstance(recorded, dict):
        raise UserError(f"{path}: files is not a JSON object; run its prepare.py again")
    for name, file in recorded.items():
        if not isinstance(file, dict) or os.path.basename(name) != name:
            raise UserError(f"{path} says {file!r:.80} of the file {name!r}; run its prepare.py again")
        there = path.with_name(name)
        tokens = file.get("tokens", there.stat().st_size // itemsize if there.is_file() else 0)
        if type(tokens) is not int or tokens < 0:
            raise UserError(f"{path} says {tokens!r} tokens in {name}; run its prepare.py again")
        files[name] = {**file, "tokens": tokens}
    return files


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that made the tokens of this dataset: .encode(text) and .decode(ids)."""
    recorded = read_meta(folder)["tokenizer"]
    if not names_tokenizer(recorded):
        example = '"tokenizer": {"kind": "tiktoken", "name": "gpt2"}'
        raise UserError(
            f"{Path(folder) / 'meta.json'} does not say how to open the tokenizer of these tokens; "
            f"add it, for example {example}"
        )
    return open_recorded_tokenizer(recorded, folder)


def names_tokenizer(recorded: Any) -> bool:
    """Whether what meta.json says of a tokenizer is enough to open it."""
    fields = {"char": ("chars",), "tiktoken": ("name",), "tokenizers": ("file", "sha256")}
    if not isinstance(recorded, dict) or not isinstance(recorded.get("kind"), str):
        return False
    return all(isinstance(recorded.get(field), str) for field in fields.get(recorded["kind"], ()))


def count_tokens(meta: dict) -> dict[str, int]:
    """Tokens of each split, over all of its files."""
    return {
        split: sum(file["tokens"] for name, file in meta["files"].items() if name.startswith(split))
        for split in SPLITS
    }


def report(meta: dict, folder: str | Path, config: str | None = None) -> None:
    """Print where the dataset is, what it holds, and the command that trains on it."""
    config = config or f"config/quickstart.py --vocab_size={meta['vocab_size']}"
    tokens = ", ".join(f"{split} {count:,}" for split, count in count_tokens(meta).items())
    print(f"in     {Path(folder).resolve()}")
    print(f"tokens {tokens}, as {meta['dtype']}")
    print(f"vocab  {meta['vocab_size']:,}, end-of-text id {meta['eot_id']}")
    print(f"next   python train.py {config} --dataset={dataset_argument(folder)}")
