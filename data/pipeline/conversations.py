"""Conversations as token ids, and which of the tokens a model learns to write.

transformers renders a conversation by the tokenizer's own chat template. The targets are what the assistant
writes and the token that ends its turn: the difference between a rendering that ends where an answer begins
(add_generation_prompt) and one that ends with the answer. Where the template marks them itself, by
{% generation %}, both must agree. A token that is no target is stored as the bitwise complement of its id, a
negative number (data/pipeline/token_files.py).

The trap: a template may render an earlier turn otherwise once a later one follows (Qwen3 leaves out the
thinking), so a mask made of parts would be wrong for the whole. Such a conversation becomes one document for
each answer, each rendered as it was when the answer was written.
"""

import copy
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.durable_file import write_bytes
from common.errors import UserError
from data.huggingface import first_line
from data.pipeline.bad_records import BadRecord
from data.tokenizers.files_beside import BESIDE

TRAIN_ON = ("assistant", "last", "all")
MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
STAND_IN = 0xF0000  # of Unicode's private plane 15: the first character for special tokens in messages
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
COUNTS = ("cut", "too_long", "targets")  # documents of the first two, and tokens


class Chat(NamedTuple):
    """What the documents of conversations depend on, apart from the tokenizer."""

    folder: str  # of the tokenizer and its chat template
    template: str  # its sha256
    end_of_turn: int  # id of the token that ends an answer
    train_on: str = "assistant"
    max_length: int = 2048  # tokens of a document
    messages_key: str = MESSAGES


class Rendered(NamedTuple):
    text: str
    targets: list[tuple[int, int]]  # (first character, the one after the last)
    ends: list[int]  # the characters after answers: where the text may be cut


class ChatTemplate:
    """A tokenizer and its chat template."""

    def __init__(self, folder: str | Path):
        """Raises UserError."""
        try:
            from transformers import AutoTokenizer

            # a folder may name code of its own, which is never run; a template runs in transformers' sandbox
            keys: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
            self.tokenizer = AutoTokenizer.from_pretrained(folder, **keys)
            self.template = self.tokenizer.get_chat_template()
            self.backend = copy.deepcopy(self.tokenizer.backend_tokenizer)
        except Exception as error:  # of a damaged file, or a missing template
            raise UserError(
                f"transformers cannot use the tokenizer.json and the chat template of {folder} "
                f"{first_line(error)}; name the folder of a model that was trained to chat, or put a "
                "chat_template.jinja there"
            ) from None
        self.sha256 = hashlib.sha256(self.template.encode()).hexdigest()
        added = self.tokenizer.added_tokens_decoder
        special = [each for each in added.values() if each.special]
        special.sort(key=lambda each: -len(each.content))
        self.ids = {each.content: number for number, each in added.items()}
        self.strips = any(each.lstrip or each.rstrip for each in special)
        self.special = re.compile("|".join(re.escape(each.content) for each in special) or "(?!)")
        self.stand_ins = {each.content: chr(STAND_IN + k) for k, each in enumerate(special)}
        self.spelled = {ord(char): content for content, char in self.stand_ins.items()}
        self.any_stand_in = re.compile(f"[{''.join(self.stand_ins.values())}]" if special else "(?!)")

    @cached_property
    def end_of_turn(self) -> int:
        """The id of the special token that ends an answer. Raises UserError."""
        messages = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
        try:
            whole = self._render(messages, None)
            _, end = self._answer(messages, 1, None, whole)
            return self.ids[self.special.findall(whole[:end])[-1]]
        except BadRecord as bad:
            template = f"the chat template of {self.tokenizer.name_or_path}"
            raise UserError(f"{template} cannot be used: of a question and an answer, {bad}") from None

    def documents(self, content: str, chat: Chat, counts: Counter[str]) -> Iterator[np.ndarray]:
        """The ids of a conversation, {"messages": ...} as JSON: int64, negative for what is no target. Counts
        those that are "cut" or "too_long". Raises BadRecord."""
        messages, tools, left_out = self._read(json.loads(content), chat.messages_key)
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [k for k in answers[-1:] if chat.train_on == "last"] or answers
        answers = [k for k in answers if k not in left_out]
        if chat.train_on != "all":
            if not answers:
                raise BadRecord("no turn of the assistant is to be learned")
            messages = messages[: answers[-1] + 1]  # nothing is learned from what follows
        for rendered in self._rendered(messages, tools, answers, left_out, chat.train_on == "all"):
            text, ends = rendered.text, list(rendered.ends)
            while len(ids := self._encode(text)) > chat.max_length and ends:
                text = text[: ends.pop()]  # at the front of the next turn
            targets = [(first, min(end, len(text))) for first, end in rendered.targets if first < len(text)]
            if len(ids) > chat.max_length:
                counts["too_long"] += 1
                continue
            counts["cut"] += len(text.rstrip()) < len(rendered.text.rstrip())
            yield self._masked(text, np.array(ids, np.int64), targets)

    def prompt(self, text: str) -> list[int]:
        """The ids of a user's message, up to where the answer begins. Raises BadRecord."""
        message = self._with_stand_ins({"role": "user", "content": text})
        return self._encode(self._render([message], None, prompt=True))

    # --- messages ---

    def _read(self, record: Any, key: str) -> tuple[list[dict], Any, set[int]]:
        """(messages, tools, numbers of the messages that say "train": false)"""
        record = record if isinstance(record, dict) else {}
        given = record.get(key)
        if given is None and PROMPT in record and COMPLETION in record:
            sides = (record[PROMPT], "user"), (record[COMPLETION], "assistant")
            lists = (s if isinstance(s, list) else [{"role": role, "content": s}] for s, role in sides)
            given = [message for side in lists for message in side]
        if not isinstance(given, list) or not given:
            raise BadRecord(f'it has no list of messages named "{key}", and no "{PROMPT}" and "{COMPLETION}"')
        messages, left_out = [], set[int]()
        for k, each in enumerate(given):
            if not isinstance(each, dict) or not isinstance(each.get("role"), str):
                raise BadRecord(f"message {k + 1} is no object with a role")
            message = {name: value for name, value in each.items() if value is not None}  # as parquet has it
            name = f"message {k + 1}"
            if not isinstance(train := message.pop("train", True), bool):
                raise BadRecord(f'{name} says "train": {train!r:.80}, which is neither true nor false')
            left_out |= set() if train else {k}
            message["content"] = self._text(message.get("content", ""), name)
            messages.append(self._with_stand_ins(message))
        return messages, self._with_stand_ins(record.get("tools")), left_out

    @staticmethod
    def _text(content: Any, where: str) -> str:
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, dict) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, dict) else part
                raise BadRecord(f"{where} has a part of kind {kind!r:.80}; only text can be trained on")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str):
            raise BadRecord(f"the content of {where} is {content!r:.80}, no text")
        return content

    def _with_stand_ins(self, value: Any) -> Any:
        """The same with a character for each special token that is spelled in it, so that all special tokens
        of a rendering are the template's."""
        if isinstance(value, dict):
            return {name: self._with_stand_ins(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self._with_stand_ins(each) for each in value]
        if not isinstance(value, str):
            return value
        if found := self.any_stand_in.search(value):
            raise BadRecord(f"it has the private character U+{ord(found[0]):X}, which is needed here")
        return self.special.sub(lambda found: self.stand_ins[found[0]], value)

    # --- text ---

    def _render(self, messages: list[dict], tools: Any, prompt: bool = False) -> str:
        if not messages and not prompt:
            return ""
        keys: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
        try:
            return self.tokenizer.apply_chat_template(messages, **keys)
        except Exception as error:  # what a template raises, and what it does not expect
            raise BadRecord(f"the chat template refuses it {first_line(error)}") from None

    def _answer(self, messages: list[dict], k: int, tools: Any, whole: str) -> tuple[int, int]:
        """(first character, the one after the last) of answer k, with the token that ends it, in `whole`, the
        rendering of the messages up to it."""
        begin, name = self._render(messages[:k], tools, prompt=True), f"message {k + 1}"
        if not whole.startswith(begin):
            raise BadRecord(
                f"the chat template does not begin {name} as add_generation_prompt begins an answer, or "
                "changes the turns before it"
            )
        ends = list(self.special.finditer(whole, len(begin)))
        if not ends or whole[ends[-1].end() :].strip():
            raise BadRecord(f"no special token ends {name}, so the model would not learn to stop")
        span = len(begin), ends[-1].end()
        said = "".join(whole[len(begin) : ends[-1].start()].split())
        if "".join(messages[k]["content"].split()) not in said:
            raise BadRecord(f"the chat template changes what {name} says")
        for what, text in self._also_said(messages[k]):
            if "".join(text.split()) not in said:
                raise BadRecord(f"the chat template leaves out the {what} of {name}")
        if GENERATION.search(self.template) and (marked := self._marked(messages[: k + 1], tools)) != span:
            raise BadRecord(
                f"the template's {{% generation %}} marks characters {marked} of {name} and its end; an "
                f"answer and the token that ends it are {span}"
            )
        return span

    @staticmethod
    def _also_said(message: dict) -> Iterator[tuple[str, str]]:
        """(what it is, text) beside the content, which not every template renders."""
        if isinstance(thinking := message.get("reasoning_content"), str):
            yield "reasoning_content", thinking
        for call in message.get("tool_calls") or []:
            name = call.get("function", call).get("name") if isinstance(call, dict) else call
            yield f"call of {name!r:.80}", str(name)

    def _marked(self, messages: list[dict], tools: Any) -> tuple[int, int] | None:
        """The last part of the rendering that the template marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        keys = {"chat_template": self.template, "return_assistant_tokens_mask": True}
        _, marked = render_jinja_template([messages], tools, **keys, **self.tokenizer.special_tokens_map)
        return tuple(marked[0][-1]) if marked[0] else None

    def _rendered(
        self, messages: list[dict], tools: Any, answers: list[int], left_out: set[int], everything: bool
    ) -> Iterator[Rendered]:
        alone = {k: self._render(messages[: k + 1], tools) for k in answers}  # as it ends with this answer
        spans = {k: self._answer(messages, k, tools, alone[k]) for k in answers}
        whole = self._render(messages, tools)
        stable = all(whole.startswith(alone[k][: spans[k][1]]) for k in answers)
        if everything:
            edges = [0]
            for k in sorted(left_out):  # all but these
                parts = self._render(messages[:k], tools), self._render(messages[: k + 1], tools)
                stable &= whole.startswith(parts[0]) and whole.startswith(parts[1])
                edges += map(len, parts)
            if not stable:
                raise BadRecord("the chat template changes earlier turns; --train_on=assistant divides them")
            edges.append(len(whole))
            spoken = list(zip(edges[::2], edges[1::2], strict=True))
            yield Rendered(whole, spoken, [end for _, end in spans.values()])
        elif stable:
            yield Rendered(whole, list(spans.values()), [end for _, end in spans.values()])
        else:
            for k in answers:
                yield Rendered(alone[k], [spans[k]], [spans[k][1]])

    # --- ids ---

    def _encode(self, text: str) -> list[int]:
        """A special token of the template is one id, and one that a message spells is text."""
        if not self.any_stand_in.search(text):
            return self.backend.encode(text, add_special_tokens=False).ids
        if self.strips:
            raise BadRecord("a message spells a special token, and this tokenizer strips spaces beside them")
        ids: list[int] = []
        at = 0
        for found in self.special.finditer(text):
            ids += [*self._spelled(text[at : found.start()]), self.ids[found[0]]]
            at = found.end()
        return ids + self._spelled(text[at:])

    def _spelled(self, text: str) -> list[int]:
        self.backend.encode_special_tokens = True
        try:
            return self.backend.encode(text.translate(self.spelled), add_special_tokens=False).ids
        finally:
            self.backend.encode_special_tokens = False

    def _masked(self, text: str, ids: np.ndarray, targets: list[tuple[int, int]]) -> np.ndarray:
        """Checks that targets begin and end between tokens, and that they decode to their text."""
        stored = ~ids
        for first, end in targets:
            place = slice(self._tokens_before(text, first, ids), self._tokens_before(text, end, ids))
            stored[place] = ids[place]
            said = self.backend.decode(ids[place].tolist(), skip_special_tokens=False)
            if said.strip() != text[first:end].translate(self.spelled).strip():
                raise BadRecord(f"the ids of an answer decode to {said!r:.80}, which it does not say")
        stored[:1] = ~ids[:1]  # in a window, only the document before could predict it
        return stored

    def _tokens_before(self, text: str, place: int, ids: np.ndarray) -> int:
        before = self._encode(text[:place])
        if before != ids[: len(before)].tolist():
            raise BadRecord(
                f"one token holds an end of an answer and what is beside it: {text[place - 9 : place + 9]!r}"
            )
        return len(before)


@cache
def open_template(folder: str) -> ChatTemplate:
    """Once in each process: opening a tokenizer takes seconds. Raises UserError."""
    return ChatTemplate(folder)


def keep_template(source: str, folder: Path) -> None:
    """Copies what a chat needs beside tokenizer.json into a dataset's folder."""
    for path in (path for pattern in BESIDE for path in Path(source).glob(pattern)):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        write_bytes(target, path.read_bytes())
