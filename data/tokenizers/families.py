"""The four tokenizers of the full configs: finds their files, and checks that they are the right ones.

There are two traps. A chat model's tokenizer names its end-of-turn token as the end of a text (Qwen3's eos is
151645), but in pretraining the base model's token ends a document, so the id is written here and checked. And
a tokenizer that has the right vocabulary, but another rule for digits, spaces or Unicode forms, gives most
texts the right ids. PROBE is a text whose ids change with each of these rules.
"""

from pathlib import Path
from typing import NamedTuple

from common.errors import UserError
from data.folders import DATA_DIR
from data.tokenizers.choice import open_or_download_tokenizer
from data.tokenizers.tokenizer import SubwordTokenizer

PROBE = " 2024! e\u0301 x.\n\n\ty's  z"


class Family(NamedTuple):
    tokenizer: str  # its name in tiktoken, or the folder that save_pretrained wrote
    repository: str | None  # on the hub; some ask the user to accept a license first
    eot: str
    eot_id: int
    probe: str  # the ids of PROBE
    config: str


FAMILIES = {
    "gpt2": Family(
        *("gpt2", None, "<|endoftext|>", 50256),
        *("48609 0 304 136 223 2124 13 628 197 88 338 220 1976", "config/full_gpt2_1.36b.py"),
    ),
    "llama": Family(
        *("llama2_tokenizer", "meta-llama/Llama-2-7b-hf", "</s>", 2),
        "259 29906 29900 29906 29946 29991 321 30103 921 29889 13 13 12 29891 29915 29879 29871 503",
        "config/full_llama_1.36b.py",
    ),
    "llama3": Family(
        *("llama3_tokenizer", "meta-llama/Meta-Llama-3-8B", "<|end_of_text|>", 128001),
        *("220 2366 19 0 384 54939 865 382 14862 596 220 1167", "config/full_llama3_1.5b_optimal.py"),
    ),
    "qwen3": Family(
        *("qwen3_tokenizer", "Qwen/Qwen3-1.7B-Base", "<|endoftext|>", 151643),
        *("220 17 15 17 19 0 3958 856 382 14522 594 220 1147", "config/full_qwen3_1.8b_optimal.py"),
    ),
}


def open_family(family: Family, name: str | None) -> SubwordTokenizer:
    """The tokenizer at `name`, or in the folder that the guide says if name is None. UserError if it is not
    the tokenizer of this family."""
    places = [place / family.tokenizer for place in (Path.cwd(), DATA_DIR.parent, DATA_DIR)]
    found = [str(place) for place in places if place.is_dir()] if family.repository else [family.tokenizer]
    if name is None and not found:
        shown = ", ".join(map(str, dict.fromkeys(places)))
        raise UserError(f"there is no tokenizer in {shown}. {how_to_get(family)}")
    name = name or found[0]
    try:
        tokenizer = open_or_download_tokenizer(name)
    except UserError as error:
        raise UserError(f"{error}\n{how_to_get(family)}" if family.repository else str(error)) from error
    probe, eot_id = " ".join(map(str, tokenizer.encode(PROBE))), tokenizer.token_id(family.eot)
    if probe != family.probe or eot_id != family.eot_id:
        raise UserError(
            f"{name} is not the tokenizer of this dataset: the ids of {PROBE!r} are {probe}, not "
            f"{family.probe}, and {family.eot} is {eot_id}, not {family.eot_id}. {how_to_get(family)}"
        )
    return tokenizer


def how_to_get(family: Family) -> str:
    if family.repository is None:
        return "It needs tiktoken: pip install tiktoken"
    accept = f" (after accepting the licence at https://huggingface.co/{family.repository})"
    login = f"    hf auth login{accept}\n" if family.repository.startswith("meta-llama") else ""
    save = f"AutoTokenizer.from_pretrained('{family.repository}').save_pretrained('./{family.tokenizer}')"
    return (
        f"In {DATA_DIR.parent}, get it with\n    pip install transformers\n{login}"
        f'    python -c "from transformers import AutoTokenizer; {save}"\n'
        "or name a folder that holds its tokenizer.json or tokenizer.model with --tokenizer"
    )
