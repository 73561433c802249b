"""meta.json: what the token files of a dataset are.

It is written last, so a folder that has a meta.json holds a complete dataset.
"""

import json
import pickle
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.folders import dataset_argument
from data.pipeline.token_files import SPLITS, smallest_dtype
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
    """The checked meta.json of a dataset folder."""
    path = Path(folder) / "meta.json"
    if not path.is_file():
        raise DataError(f"{path} does not exist, so {folder} holds no complete dataset; run its prepare.py")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); run its prepare.py again") from error
    if meta.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {meta.get('format')!r}, this code reads {FORMAT}; run its prepare.py"
        )
    return meta


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that made the tokens of this dataset: .encode(text) and .decode(ids)."""
    return open_recorded_tokenizer(read_meta(folder)["tokenizer"], folder)


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
