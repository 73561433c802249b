"""Opens the tokenizer of a dataset. Training imports none of this: it compares the hash in meta.json."""

from pathlib import Path
from typing import Any

from common.errors import UserError
from data.pipeline.meta_file import NANOGPT, read_meta
from data.tokenizers.tokenizer import OF_FILES, Tokenizer, open_recorded_tokenizer


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer that made the tokens of this dataset: .encode(text) and .decode(ids)."""
    recorded = read_meta(folder)["tokenizer"]
    if not names_tokenizer(recorded):
        path = Path(folder) / "meta.json"
        raise UserError(
            f"{path} does not say how to open the tokenizer of these tokens; run the dataset's prepare.py "
            f"again, or add it by hand; of GPT-2's tokens, all of it is: {NANOGPT}"
        )
    return open_recorded_tokenizer(recorded, folder)


def names_tokenizer(recorded: dict[str, Any] | None) -> bool:
    """Whether what meta.json says of a tokenizer is enough to open it."""
    fields = {"char": ["chars"], "tiktoken": ["name"]} | dict.fromkeys(OF_FILES, ["file", "sha256"])
    return recorded is not None and all(map(recorded.get, fields.get(recorded.get("kind", ""), ["no kind"])))
