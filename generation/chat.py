"""Puts a prompt into the chat template of a tokenizer, as transformers does it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from data.huggingface import first_line

PLACES = ("chat_template.jinja", "tokenizer_config.json")


def apply_template(folder: Path, prompts: Iterable[str]) -> tuple[list[list[int]], set[int]]:
    """The ids of each prompt, as a user's message up to where the answer begins, and the id that ends an
    answer, if the tokenizer names one. Raises UserError."""
    if not any((folder / name).is_file() for name in PLACES):
        raise _no_template(folder)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError("--chat needs transformers: pip install -r requirements.txt") from None
    try:
        # a folder may name code of its own, which is never run
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises many classes for a damaged file
        raise UserError(
            f"--chat: transformers cannot open the tokenizer in {folder} {first_line(error)}"
        ) from None
    if not tokenizer.chat_template:
        raise _no_template(folder)
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    try:
        return [_ids(tokenizer, prompt) for prompt in prompts], ends
    except Exception as error:  # a template is a program, in a sandbox, and may fail in any way
        raise UserError(f"--chat: the chat template in {folder} fails {first_line(error)}") from None


def _ids(tokenizer, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _no_template(folder: Path) -> UserError:
    return UserError(
        f"--chat: the tokenizer in {folder} has no chat template, neither {PLACES[0]} nor one in {PLACES[1]}"
        "; leave out --chat, or name the folder of a model that was trained to chat"
    )
