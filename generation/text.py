"""Turns ids into text while they are made. A character may be spread over several tokens: text is given out
as soon as no later token can change it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from data.tokenizers.tokenizer import Tokenizer
from generation.decoding import stream
from model import Transformer

BROKEN = "\ufffd"  # what a tokenizer shows in place of a part of a character


class TextStream:
    """The text of ids that come one by one after those of a prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self.tokenizer = tokenizer
        # Decoded together with the ids before them, because some tokenizers drop the space in front of the
        # first token: ids[: known] are text already, the rest is not.
        self.ids, self.known = list(prompt), len(prompt)

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self.ids.append(token)
        text = self.end()
        if not text or text.endswith(BROKEN):
            return ""
        # what is decoded next needs no more than the tokens of this text in front of it
        self.ids, self.known = self.ids[self.known :], len(self.ids) - self.known
        return text

    def end(self) -> str:
        """What is left when no more tokens come."""
        before = self.tokenizer.decode(self.ids[: self.known])
        return self.tokenizer.decode(self.ids)[len(before) :]


def stream_text(
    model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], *arguments, **keys
) -> Iterator[tuple[int, str]]:
    """(number of a prompt, more of its new text) as it is made. The other arguments are stream()'s."""
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    for number, token in stream(model, prompts, *arguments, **keys):
        yield number, streams[number].add(token)
    yield from ((number, one.end()) for number, one in enumerate(streams))
