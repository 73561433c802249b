"""Turns ids into text while they are made, up to a stop string, and makes texts from prompts.

A character may be spread over several tokens, and a stop string too: text is given out as soon as no later
token can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from data.tokenizers.tokenizer import Tokenizer
from generation.choice import GREEDY, Choice
from generation.decoding import Speed, generate
from model import Transformer

BROKEN = "\ufffd"  # what a tokenizer shows in place of a part of a character
OnText = Callable[[int, str], None]  # (number of the sequence, more of its text)


class TextStream:
    """The text of ids that come one by one after those of a prompt."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        # Decoded together with the ids before them, because some tokenizers drop the space in front of the
        # first token: ids[: known] are text already, the rest is not.
        self.ids, self.known = list(prompt), len(prompt)
        self.held = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self.ids.append(token)
        text = self._decoded()
        return "" if text.endswith(BROKEN) else self._take(text)

    def end(self) -> str:
        """What is left when no more tokens come."""
        text = self._take(self._decoded()) + self.held
        self.held = ""
        return text

    def _decoded(self) -> str:
        before = self.tokenizer.decode(self.ids[: self.known])
        return self.tokenizer.decode(self.ids)[len(before) :]

    def _take(self, text: str) -> str:
        if not text or self.stopped:
            return ""
        # what is decoded next needs no more than the tokens of this text in front of it
        self.ids, self.known = self.ids[self.known :], len(self.ids) - self.known
        text = self.held + text
        if found := [text.find(stop) for stop in self.stops if stop in text]:
            self.stopped, self.held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text with which the stop string begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def generate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choice: Choice = GREEDY,
    *,
    seeds: Sequence[int] | None = None,
    ends: Collection[int] = (),
    stops: Sequence[str] = (),
    on_text: OnText | None = None,
    speed: Speed | None = None,
) -> list[str]:
    """The new text of each prompt, up to the first of the stop strings, which is left out. on_text gets it as
    it is made. The rest is as in generate()."""
    streams = [TextStream(tokenizer, prompt, stops) for prompt in prompts]
    texts = ["" for _ in prompts]

    def give(number: int, text: str) -> None:
        texts[number] += text
        if text and on_text is not None:
            on_text(number, text)

    def on_token(number: int, token: int) -> bool:
        give(number, streams[number].add(token))
        return streams[number].stopped

    generate(model, prompts, max_new_tokens, choice, seeds=seeds, ends=ends, on_token=on_token, speed=speed)
    for number, stream in enumerate(streams):
        give(number, stream.end())
    return texts
