"""The four tokenizers of the full configs: where to look for their files, and that they are the right ones.

The traps: a chat model's tokenizer says that its end-of-turn token ends a text (Qwen3's eos is 151645), while
in pretraining a document ends with the base model's token, so the id is stated here and checked. And a
tokenizer with the right vocabulary but another rule for digits, spaces or Unicode forms gives most texts the
right ids: PROBE is a text that each of these rules changes.
"""

from dataclasses import dataclass
from pathlib import Path

from data.pipeline.hub import download_tokenizer
from data.pipeline.token_files import DATA_DIR, DataError, FileTokenizer, TiktokenTokenizer, open_tokenizer

HUB = "hf:"  # --tokenizer hf:OWNER/NAME
PROBE = " 2024! e\u0301 x.\n\n\ty's  z"


@dataclass(frozen=True)
class Family:
    tokenizer: str  # tiktoken's name, or the folder that save_pretrained wrote
    repository: str | None  # on the hub, whose licence may have to be accepted
    eot: str
    eot_id: int
    probe: str  # the ids of PROBE
    config: str


FAMILIES = {
    "gpt2": Family(
        "gpt2",
        None,
        "<|endoftext|>",
        50256,
        "48609 0 304 136 223 2124 13 628 197 88 338 220 1976",
        "config/full_gpt2_1.36b.py",
    ),
    "llama": Family(
        "llama2_tokenizer",
        "meta-llama/Llama-2-7b-hf",
        "</s>",
        2,
        "259 29906 29900 29906 29946 29991 321 30103 921 29889 13 13 12 29891 29915 29879 29871 503",
        "config/full_llama_1.36b.py",
    ),
    "llama3": Family(
        "llama3_tokenizer",
        "meta-llama/Meta-Llama-3-8B",
        "<|end_of_text|>",
        128001,
        "220 2366 19 0 384 54939 865 382 14862 596 220 1167",
        "config/full_llama3_1.5b_optimal.py",
    ),
    "qwen3": Family(
        "qwen3_tokenizer",
        "Qwen/Qwen3-1.7B-Base",
        "<|endoftext|>",
        151643,
        "220 17 15 17 19 0 3958 856 382 14522 594 220 1147",
        "config/full_qwen3_1.8b_optimal.py",
    ),
}


def open_named(name: str) -> TiktokenTokenizer | FileTokenizer:
    """A file, a folder, a name of tiktoken's, or hf:OWNER/NAME."""
    if not name.startswith(HUB):
        return open_tokenizer(name)
    repository = name.removeprefix(HUB)
    tokenizer = open_tokenizer(download_tokenizer(repository))
    tokenizer.meta["name"] = repository  # its folder in the cache is named by a hash
    return tokenizer


def open_family(family: Family, name: str | None) -> TiktokenTokenizer | FileTokenizer:
    """The tokenizer at `name`, or where the guide puts it, if it is this family's."""
    if name is None:
        name = family.tokenizer if family.repository is None else str(_find_folder(family))
    elif family.repository is not None and not name.startswith(HUB) and not Path(name).exists():
        raise DataError(f"--tokenizer {name}: no such file or folder. {how_to_get(family)}")
    try:
        tokenizer = open_named(name)
    except DataError as error:
        hint = "" if family.repository is None else f"\n{how_to_get(family)}"
        raise DataError(f"{error}{hint}") from error
    probe, eot_id = " ".join(map(str, tokenizer.encode(PROBE))), tokenizer.token_id(family.eot)
    if probe != family.probe or eot_id != family.eot_id:
        raise DataError(
            f"{name} is not the tokenizer of this dataset: the ids of {PROBE!r} are {probe}, not "
            f"{family.probe}, and {family.eot} is {eot_id}, not {family.eot_id}. {how_to_get(family)}"
        )
    return tokenizer


def _find_folder(family: Family) -> Path:
    places = [Path.cwd() / family.tokenizer, DATA_DIR.parent / family.tokenizer, DATA_DIR / family.tokenizer]
    for place in places:
        if place.is_dir():
            return place
    raise DataError(
        f"there is no tokenizer in {', '.join(map(str, dict.fromkeys(places)))}. {how_to_get(family)}"
    )


def how_to_get(family: Family) -> str:
    if family.repository is None:
        return "It needs tiktoken: pip install tiktoken"
    licence = f" (after accepting the licence at https://huggingface.co/{family.repository})"
    login = f"    hf auth login{licence}\n" if family.repository.startswith("meta-llama") else ""
    save = f"AutoTokenizer.from_pretrained('{family.repository}').save_pretrained('./{family.tokenizer}')"
    return (
        f"In {DATA_DIR.parent}, get it with\n"
        f"    pip install transformers\n{login}"
        f'    python -c "from transformers import AutoTokenizer; {save}"\n'
        f"or name a folder that holds its tokenizer.json, tokenizer.model, or vocab.json and merges.txt with "
        f"--tokenizer"
    )
