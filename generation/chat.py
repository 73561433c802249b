"""Puts a prompt into the chat template of a tokenizer, as transformers does it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from data.huggingface import first_line


def apply_template(folder: Path, prompts: Iterable[str]) -> tuple[list[list[int]], set[int]]:
    """The ids of each prompt, as a user's message up to where the answer begins, and the id that ends an
    answer, if the tokenizer names one. Raises UserError."""
    try:
        from transformers import AutoTokenizer

        # a folder may name code of its own, which is never run; a template runs in transformers' sandbox
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        keys = dict(add_generation_prompt=True, return_dict=False)
        ids = [list(tokenizer.apply_chat_template(chat, **keys)) for chat in chats]
    except Exception as error:  # of a damaged file, a missing template, or what a template does
        raise UserError(
            f"--chat: transformers cannot use a chat template of {folder} {first_line(error)}; "
            "leave out --chat, or name the folder of a model that was trained to chat"
        ) from None
    return ids, set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
