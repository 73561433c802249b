"""Puts a prompt into the chat template of a tokenizer, as a preparation of conversations does it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError
from data.pipeline.bad_records import BadRecord
from data.pipeline.conversations import ChatTemplate


def apply_template(folder: Path, prompts: Iterable[str]) -> tuple[list[list[int]], set[int]]:
    """The ids of each prompt, as a user's message up to where the answer begins, and the id that ends an
    answer, if the tokenizer names one. A special token that a prompt spells is text. Raises UserError."""
    try:
        template = ChatTemplate(folder)
        ids = [template.prompt(prompt) for prompt in prompts]
    except (UserError, BadRecord) as error:
        raise UserError(
            f"--chat: transformers cannot use a chat template of {folder}: {error}; or leave out --chat"
        ) from None
    end = template.tokenizer.eos_token_id
    return ids, set() if end is None else {int(end)}
