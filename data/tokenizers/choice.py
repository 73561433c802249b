"""Chooses a tokenizer for a dataset, also from the hub, and its token that ends each document."""

from pathlib import Path

from common.errors import UserError
from data.huggingface import hub_library, why_no_download
from data.tokenizers.files_beside import BESIDE
from data.tokenizers.tokenizer import HUB_PREFIX, SubwordTokenizer, Tokenizer, open_tokenizer

HUB_FILES = ["tokenizer.json", "tokenizer.model", *BESIDE]
EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # in order of preference


def open_or_download_tokenizer(name: str) -> SubwordTokenizer:
    """As open_tokenizer, or from the hub, by way of its cache, where the name is hf:OWNER/NAME."""
    repository = name.removeprefix(HUB_PREFIX)
    if repository == name or Path(repository).expanduser().exists():
        return open_tokenizer(name)
    library = hub_library()
    try:
        folder = library.snapshot_download(repository, allow_patterns=HUB_FILES)
    except Exception as error:
        page = f"https://huggingface.co/{repository}"
        raise UserError(
            f"there is no folder {repository}, and the tokenizer of {repository} could not be downloaded "
            f"{why_no_download(error)}. If it asks for a licence, accept that at {page} and run: hf auth "
            "login. Without a network, copy the files here and name their folder"
        ) from error
    tokenizer = open_tokenizer(folder)
    tokenizer.meta["name"] = repository  # its folder in the hub's cache is named by a hash
    return tokenizer


def find_eot(tokenizer: Tokenizer, wanted: str | None) -> int:
    """The id of the token with this name, or of the first of EOT_NAMES that the tokenizer has. UserError if
    ordinary text could be encoded to this token, because a document would then end in its middle."""
    names = (wanted,) if wanted else EOT_NAMES
    found = {name: eot_id for name in names if (eot_id := tokenizer.token_id(name)) is not None}
    if not found:
        raise UserError(
            f"the tokenizer has no token {' or '.join(names)}; name its end-of-text token with --eot"
        )
    name, eot_id = next(iter(found.items()))
    if eot_id in tokenizer.encode(name):
        raise UserError(
            f"a document that spells {name} would end there, as the tokenizer does not mark it as special; "
            f'choose another with --eot, or set "special": true for it in tokenizer.json'
        )
    return eot_id
