"""The four tokenizers of the full configs: where to look for their files, and that they are the right ones.

The trap: a chat model's tokenizer says that its end-of-turn token ends a text (Qwen3's eos is 151645). In
pretraining a document ends with the base model's token, so the id is stated here and checked.
"""

from dataclasses import dataclass
from pathlib import Path

from data.tokens import DATA_DIR, DataError, FileTokenizer, TiktokenTokenizer, open_tokenizer

HUB = "hf:"  # --tokenizer hf:OWNER/NAME


@dataclass(frozen=True)
class Family:
    tokenizer: str  # tiktoken's name, or the folder that save_pretrained wrote
    repository: str | None  # on the hub, whose licence may have to be accepted
    eot: str
    eot_id: int
    hello: tuple[int, ...]  # the ids of "hello world"
    config: str


FAMILIES = {
    "gpt2": Family("gpt2", None, "<|endoftext|>", 50256, (31373, 995), "config/full_gpt2_1.36b.py"),
    "llama": Family(
        "llama2_tokenizer", "meta-llama/Llama-2-7b-hf", "</s>", 2, (22172, 3186), "config/full_llama_1.36b.py"
    ),
    "llama3": Family(
        "llama3_tokenizer",
        "meta-llama/Meta-Llama-3-8B",
        "<|end_of_text|>",
        128001,
        (15339, 1917),
        "config/full_llama3_1.5b_optimal.py",
    ),
    "qwen3": Family(
        "qwen3_tokenizer",
        "Qwen/Qwen3-1.7B-Base",
        "<|endoftext|>",
        151643,
        (14990, 1879),
        "config/full_qwen3_1.8b_optimal.py",
    ),
}


def open_family(family: Family, name: str | None) -> TiktokenTokenizer | FileTokenizer:
    """The tokenizer at `name`, or where the guide puts it, if it is this family's."""
    if name is None:
        name = family.tokenizer if family.repository is None else str(_find_folder(family))
    elif name.startswith(HUB):
        from data.hub import download_tokenizer

        name = download_tokenizer(name.removeprefix(HUB))
    elif family.repository is not None and not Path(name).exists():
        raise DataError(f"--tokenizer {name}: no such file or folder. {how_to_get(family)}")
    tokenizer = open_tokenizer(name)
    hello, eot_id = tuple(tokenizer.encode("hello world")), tokenizer.token_id(family.eot)
    if hello != family.hello or eot_id != family.eot_id:
        raise DataError(
            f"{name} is not the tokenizer of this dataset: 'hello world' is {list(hello)} and {family.eot} "
            f"is {eot_id}, not {list(family.hello)} and {family.eot_id}. {how_to_get(family)}"
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
        f"or name a folder that holds its tokenizer.json or tokenizer.model with --tokenizer"
    )
