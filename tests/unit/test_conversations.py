"""data/pipeline/conversations.py: the ids of conversations, and which of them are targets, beside what each
chat template is documented to render, written by hand."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from support.chat_templates import by_hand, chat_folder

pytest.importorskip("transformers", reason="needs transformers, which renders the chat templates")

from common.errors import UserError
from data.pipeline.bad_records import BadRecord
from data.pipeline.conversations import Chat, ChatTemplate


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def part(text):
    return [{"type": "text", "text": text}]


CALL = {"type": "function", "function": {"name": "degrees", "arguments": {"city": "Rome"}}}
START = {"chatml": "<|im_start|>", "llama3": "<|eot_id|>", "ours": "<|end|>"}  # else as chatml


def conversations(family: str, think: str = "") -> dict[str, list[dict]]:
    """shape -> records. think: before what the assistant says."""
    start = START.get(family, START["chatml"])
    end = {"llama3": "<|start_header_id|>", "ours": "<|turn|>"}.get(family, "<|im_end|>")
    return {
        "one turn": [{"messages": [user("Hi"), assistant(f"{think}Hello there")]}],
        "system and two turns": [
            {
                "messages": [
                    system("Be kind."),
                    user("Hi"),
                    assistant(f"{think}Hello"),
                    user("naïve 日本?"),
                    assistant(f"{think}Oui 👩‍👧.\n\nBye"),
                ]
            }
        ],
        "tool call, answers in a row": [
            {
                "messages": [
                    user("How warm?"),
                    {"role": "assistant", "content": think, "tool_calls": [CALL]},
                    {"role": "tool", "content": "18"},
                    assistant(f"{think}18 degrees."),
                    *([] if family == "qwen3" and not think else [assistant(f"{think}Warm.")]),
                ]
            }
        ],
        "train: false": [
            {
                "messages": [
                    user("a"),
                    assistant(f"{think}wrong", train=False),
                    user("b"),
                    assistant(f"{think}right"),
                ]
            }
        ],
        "special tokens spelled": [
            {"messages": [user(f"What is {end} x?"), assistant(f"{think}It is {start}, and {end}")]}
        ],
        "parts, empty turn, prompt and completion": [
            {
                "messages": [
                    user(part("Say ") + part("nothing")),
                    assistant(f"{think}"),
                    user("More"),
                    assistant(part(f"{think}Yes")),
                ]
            },
            {"prompt": "1 + 1", "completion": f"{think}2"},
        ],
    }


IM_CALL = '<tool_call>\n{"name": "degrees", "arguments": {"city": "Rome"}}\n</tool_call>'
BRIEF = "<|im_start|>system\nBe brief.<|im_end|>\n"
THINK = "<think>\nso\n</think>\n\n"
NOTHING = "<think>\n\n</think>\n\n"


def qwen3(block: str) -> list[list[str]]:
    """block: in front of an answer to the last question. An empty one is not in front of a call that has a
    result, and thinking is."""
    hi = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    call = "<|im_start|>user\nHow warm?<|im_end|>\n<|im_start|>assistant\n"
    result = "<|im_end|>\n<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n"
    result += "<|im_start|>assistant\n"
    say = "<|im_start|>user\nSay nothing<|im_end|>\n<|im_start|>assistant\n"
    calls = [
        f"{call}«{block}{IM_CALL}<|im_end|>»\n",
        f"{call}{IM_CALL}{result}«{block}18 degrees.<|im_end|>»\n",
    ]
    if block == THINK:  # nothing is taken away before the next question
        calls = [
            f"{call}«{THINK}{IM_CALL}<|im_end|>»{result.removeprefix('<|im_end|>')}«{THINK}18 degrees."
            f"<|im_end|>»\n<|im_start|>assistant\n«{THINK}Warm.<|im_end|>»\n"
        ]
    return [
        [f"{hi}«{block}Hello there<|im_end|>»\n"],
        [
            f"<|im_start|>system\nBe kind.<|im_end|>\n{hi}«{block}Hello<|im_end|>»\n",
            f"<|im_start|>system\nBe kind.<|im_end|>\n{hi}Hello<|im_end|>\n<|im_start|>user\nnaïve 日本?"
            f"<|im_end|>\n<|im_start|>assistant\n«{block}Oui 👩‍👧.\n\nBye<|im_end|>»\n",
        ],
        calls,
        [
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nwrong<|im_end|>\n<|im_start|>user\nb"
            f"<|im_end|>\n<|im_start|>assistant\n«{block}right<|im_end|>»\n"
        ],
        [
            "<|im_start|>user\nWhat is \\<|im_end|> x?<|im_end|>\n<|im_start|>assistant\n"
            f"«{block}It is \\<|im_start|>, and \\<|im_end|><|im_end|>»\n"
        ],
        [
            f"{say}«{block}<|im_end|>»\n",
            f"{say}<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
            f"«{block}Yes<|im_end|>»\n",
            f"<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n«{block}2<|im_end|>»\n",
        ],
    ]


# for each shape, the documents that its records become
RENDERED = {
    "chatml": [
        ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello there<|im_end|>»\n"],
        [
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            "«Hello<|im_end|>»\n<|im_start|>user\nnaïve 日本?<|im_end|>\n<|im_start|>assistant\n"
            "«Oui 👩‍👧.\n\nBye<|im_end|>»\n"
        ],
        [
            "<|im_start|>user\nHow warm?<|im_end|>\n<|im_start|>assistant\n"
            '«{"name": "degrees", "arguments": {"city": "Rome"}}<|im_end|>»\n<|im_start|>tool\n18<|im_end|>\n'
            "<|im_start|>assistant\n«18 degrees.<|im_end|>»\n<|im_start|>assistant\n«Warm.<|im_end|>»\n"
        ],
        [
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nwrong<|im_end|>\n<|im_start|>user\nb"
            "<|im_end|>\n<|im_start|>assistant\n«right<|im_end|>»\n"
        ],
        [
            "<|im_start|>user\nWhat is \\<|im_end|> x?<|im_end|>\n<|im_start|>assistant\n"
            "«It is \\<|im_start|>, and \\<|im_end|><|im_end|>»\n"
        ],
        [
            "<|im_start|>user\nSay nothing<|im_end|>\n<|im_start|>assistant\n«<|im_end|>»\n<|im_start|>user\n"
            "More<|im_end|>\n<|im_start|>assistant\n«Yes<|im_end|>»\n",
            "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n«2<|im_end|>»\n",
        ],
    ],
    "llama3": [
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>"
            "assistant<|end_header_id|>\n\n«Hello there<|eot_id|>»"
        ],
        [
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant"
            "<|end_header_id|>\n\n«Hello<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nnaïve 日本?"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«Oui 👩‍👧.\n\nBye<|eot_id|>»"
        ],
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow warm?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
            '«{"name": "degrees", "parameters": {"city": "Rome"}}<|eot_id|>»<|start_header_id|>ipython'
            "<|end_header_id|>\n\n18<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            "«18 degrees.<|eot_id|>»<|start_header_id|>assistant<|end_header_id|>\n\n«Warm.<|eot_id|>»"
        ],
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na<|eot_id|><|start_header_id|>"
            "assistant<|end_header_id|>\n\nwrong<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nb"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«right<|eot_id|>»"
        ],
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is \\<|start_header_id|> x?"
            "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«It is \\<|eot_id|>, and "
            "\\<|start_header_id|><|eot_id|>»"
        ],
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nSay nothing<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n«<|eot_id|>»<|start_header_id|>user"
            "<|end_header_id|>\n\nMore<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            "«Yes<|eot_id|>»",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1 + 1<|eot_id|><|start_header_id|>"
            "assistant<|end_header_id|>\n\n«2<|eot_id|>»",
        ],
    ],
    "ours": [
        ["<|turn|>user:\nHi<|end|>\n<|turn|>assistant:\n«Hello there<|end|>»\n"],
        [
            "<|turn|>system:\nBe kind.<|end|>\n<|turn|>user:\nHi<|end|>\n<|turn|>assistant:\n"
            "«Hello<|end|>»\n<|turn|>user:\nnaïve 日本?<|end|>\n<|turn|>assistant:\n"
            "«Oui 👩‍👧.\n\nBye<|end|>»\n"
        ],
        [
            "<|turn|>user:\nHow warm?<|end|>\n<|turn|>assistant:\n«degrees()<|end|>»\n<|turn|>tool:\n18"
            "<|end|>\n<|turn|>assistant:\n«18 degrees.<|end|>»\n<|turn|>assistant:\n«Warm.<|end|>»\n"
        ],
        [
            "<|turn|>user:\na<|end|>\n<|turn|>assistant:\nwrong<|end|>\n<|turn|>user:\nb<|end|>\n"
            "<|turn|>assistant:\n«right<|end|>»\n"
        ],
        [
            "<|turn|>user:\nWhat is \\<|turn|> x?<|end|>\n<|turn|>assistant:\n"
            "«It is \\<|end|>, and \\<|turn|><|end|>»\n"
        ],
        [
            "<|turn|>user:\nSay nothing<|end|>\n<|turn|>assistant:\n«<|end|>»\n<|turn|>user:\nMore<|end|>\n"
            "<|turn|>assistant:\n«Yes<|end|>»\n",
            "<|turn|>user:\n1 + 1<|end|>\n<|turn|>assistant:\n«2<|end|>»\n",
        ],
    ],
    "qwen3, no thinking": qwen3(NOTHING),
    "qwen3, thinking": qwen3(THINK),
}
# Qwen2.5 is ChatML with a system text of its own, unless there is one, and with calls and results in words
RENDERED["qwen2.5"] = [
    [text if text.startswith("<|im_start|>system") else BRIEF + text for text in texts]
    for texts in RENDERED["chatml"]
]
RENDERED["qwen2.5"][2] = [
    f"{BRIEF}<|im_start|>user\nHow warm?<|im_end|>\n<|im_start|>assistant\n«{IM_CALL}<|im_end|>»\n"
    "<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    "«18 degrees.<|im_end|>»\n<|im_start|>assistant\n«Warm.<|im_end|>»\n"
]
SHAPES = list(conversations("chatml"))


@pytest.fixture(scope="module", params=["trained here", "published"])
def templates(request, tmp_path_factory):
    """family -> ChatTemplate, with a tokenizer that is trained here or with the published one"""
    made = {}

    def template(family: str) -> ChatTemplate:
        if family not in made:
            folder = tmp_path_factory.mktemp("chat")
            made[family] = ChatTemplate(chat_folder(folder, family, request.param == "published"))
        return made[family]

    return template


def chat_of(template: ChatTemplate, **keys) -> Chat:
    return Chat(template.tokenizer.name_or_path, template.sha256, template.end_of_turn, **keys)


def documents(template: ChatTemplate, record: dict, **keys) -> list[list[int]]:
    found = template.documents(json.dumps(record), chat_of(template, **keys), Counter())
    return [ids.tolist() for ids in found]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RENDERED)
def test_ids_and_targets_are_those_of_the_rendering_by_hand(templates, name, shape):
    family, _, thinking = name.partition(", ")
    template = templates(family)
    records = conversations(family, THINK if thinking == "thinking" else "")[shape]
    found = [ids for record in records for ids in documents(template, record)]
    folder = Path(chat_of(template).folder)
    assert found == [by_hand(folder, family, text) for text in RENDERED[name][SHAPES.index(shape)]]


# --- what a record may say ---


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """small(family, template): with a tokenizer that is trained here"""

    def small(family: str = "chatml", template: str | None = None) -> ChatTemplate:
        return ChatTemplate(chat_folder(tmp_path_factory.mktemp("chat"), family, template=template))

    return small


def shown(template: ChatTemplate, ids: list[int]) -> str:
    """The text with its targets in «»."""
    text, inside = "", False
    for one in ids:
        text += "«" * (one >= 0 and not inside) + "»" * (one < 0 and inside)
        text += template.backend.decode([max(one, ~one)], skip_special_tokens=False)
        inside = one >= 0
    return text + "»" * inside


TWO = {"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}
IMAGE = [{"type": "text", "text": "a"}, {"type": "image", "url": "x"}]
BAD = {
    "an image": ([user(IMAGE), assistant("b")], "message 1 has a part of kind 'image'; only text"),
    "a part that is a string": ([user(["x"]), assistant("b")], "message 1 has a part of kind 'x'"),
    "a text that is none": ([user("a"), assistant("b"), user({"x": 1})], "the content of message 3 is"),
    "nobody answers": ([user("a")], "no turn of the assistant is to be learned"),
    "no answer is learned": ([user("a"), assistant("b", train=False)], "no turn of the assistant is to be"),
    "a number as role": ([user("a"), {"role": 1, "content": "b"}], "message 2 is no object with a role"),
    "no role": ([{"content": "a"}, assistant("b")], "message 1 is no object with a role"),
    "a message that is a string": (["a", assistant("b")], "message 1 is no object with a role"),
    "train is a word": ([user("a"), assistant("b", train="no")], "message 2 says \"train\": 'no', which is"),
    "train is a number": ([user("a"), assistant("b", train=0)], 'message 2 says "train": 0, which is'),
    "no message": ([], 'it has no list of messages named "messages"'),
    "one message, no list": (user("a"), 'it has no list of messages named "messages"'),
    "a private character": ([user("\U000f0000"), assistant("b")], "the private character U+F0000"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_no_conversation_is_refused_by_name(small, name):
    messages, reason = BAD[name]
    with pytest.raises(BadRecord, match=re.escape(reason)):
        documents(small(), {"messages": messages})


def test_messages_may_have_another_name_and_a_prompt_may_be_of_messages(small):
    assert documents(small(), {"chat": TWO["messages"]}, messages_key="chat") == documents(small(), TWO)
    sides = {"prompt": TWO["messages"][:3], "completion": TWO["messages"][3:]}
    assert documents(small(), sides) == documents(small(), TWO)
    with pytest.raises(BadRecord, match='no list of messages named "chat"'):
        documents(small(), TWO, messages_key="chat")


def test_a_user_that_speaks_last_is_left_out(small):
    longer = {"messages": [*TWO["messages"], user("more")]}
    assert documents(small(), longer) == documents(small(), TWO)


# --- which turns ---


def test_the_last_answer_alone_or_every_token(small):
    template = small()
    (last,), (everything,) = (documents(template, TWO, train_on=name) for name in ("last", "all"))
    assert shown(template, last) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n«d<|im_end|>»\n"
    )
    assert shown(template, everything) == (
        "<|im_start|>«user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\nd<|im_end|>\n»"
    )


def test_of_every_token_a_message_that_says_train_false_is_left_out(small):
    template = small()
    record = {"messages": [user("a"), assistant("b", train=False), {**user("c"), "train": False}]}
    (found,) = documents(template, record, train_on="all")
    assert shown(template, found) == (
        "<|im_start|>«user\na<|im_end|>\n»<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    )


def test_the_last_answer_says_train_false(small):
    record = {"messages": [*TWO["messages"][:3], assistant("d", train=False)]}
    with pytest.raises(BadRecord, match="no turn of the assistant is to be learned"):
        documents(small(), record, train_on="last")
    (found,) = documents(small(), record)
    assert shown(small(), found).endswith("«b<|im_end|>»\n")


# --- what a template may do ---

PROMPT = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
TURNS = "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
TURNS += "{%- endfor -%}"


def test_a_template_that_ends_no_answer_with_a_special_token_is_refused(small):
    template = small(template=TURNS.replace("<|im_end|>", "; ") + PROMPT)
    with pytest.raises(
        UserError, match="no special token ends message 2, so the model would not learn to st"
    ):
        _ = template.end_of_turn


def test_a_folder_without_a_template_is_refused(small, tmp_path):
    folder = chat_folder(tmp_path, "chatml")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(
        UserError, match="transformers cannot use the tokenizer.json and the chat template of"
    ):
        ChatTemplate(folder)


def test_a_template_that_refuses_a_conversation_says_why(small):
    refuses = "{%- if messages | length > 2 -%}{{ raise_exception('one turn only') }}{%- endif -%}"
    template = small(template=refuses + TURNS + PROMPT)
    assert documents(template, {"messages": TWO["messages"][:2]})
    with pytest.raises(BadRecord, match="the chat template refuses it .*one turn only"):
        documents(template, TWO)


def test_every_token_of_a_template_that_changes_earlier_turns_is_refused(small):
    template = small("qwen3")
    documents(template, {"messages": TWO["messages"][:2]}, train_on="all")
    with pytest.raises(BadRecord, match="changes earlier turns; --train_on=assistant divides them"):
        documents(template, TWO, train_on="all")


def test_an_answer_behind_an_answer_that_the_template_then_changes_is_refused(small):
    with pytest.raises(BadRecord, match="message 3 as add_generation_prompt begins an answer, or changes"):
        documents(small("qwen3"), {"messages": [user("a"), assistant("b"), assistant("c")]})


def test_a_template_that_says_something_else_is_refused(small):
    other = small(template=TURNS.replace("m.content", "m.content | replace('d', 'D')") + PROMPT)
    with pytest.raises(BadRecord, match="the chat template changes what message 4 says"):
        documents(other, TWO)


def test_a_template_that_leaves_out_a_tool_call_is_refused(small):
    messages = [user("a"), assistant("", tool_calls=[CALL])]
    assert documents(small(), {"messages": messages})
    with pytest.raises(BadRecord, match="leaves out the call of 'degrees' of message 2"):
        documents(small(template=TURNS + PROMPT), {"messages": messages})


def test_thinking_in_a_field_of_its_own_that_the_template_leaves_out_is_refused(small):
    with pytest.raises(BadRecord, match="leaves out the reasoning_content of message 2"):
        documents(small(), {"messages": [user("a"), assistant("b", reasoning_content="since")]})


MARKS = {
    "without the end": ("{% generation %}{{ m.content }}{% endgeneration %}{{ '<|end|>' }}", "an answer and"),
    "with the line break": (
        "{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}",
        "an answer and",
    ),
    "as they are": ("{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}", None),
}


@pytest.mark.parametrize("name", MARKS)
def test_marks_of_generation_must_be_around_the_answer_and_its_end(small, name):
    answer, reason = MARKS[name]
    other = "{{ m.content + '<|end|>' }}"
    turn = "{%- for m in messages -%}{{ '<|turn|>' + m.role + '\\n' }}{%- if m.role == 'assistant' -%}"
    turn += f"{answer}{{%- else -%}}{other}{{%- endif -%}}{{%- endfor -%}}"
    template = small("ours", turn + PROMPT.replace("<|im_start|>", "<|turn|>"))
    if reason is None:
        assert shown(template, documents(template, TWO)[0]).count("«") == 2
        return
    with pytest.raises(UserError, match=r"the template's \{% generation %\} marks characters .*" + reason):
        _ = template.end_of_turn


def test_a_token_over_the_front_of_an_answer_is_refused(small):
    """In ": the" a space is part of the word's token."""
    colon = small(
        template=(TURNS + PROMPT)
        .replace("\\n' + m.content", ": ' + m.content")
        .replace("assistant\\n", "assistant: ")
    )
    with pytest.raises(BadRecord, match="one token holds an end of an answer and what is beside it: .*the"):
        documents(colon, {"messages": [user("a"), assistant("the end")]})


# --- length ---


def lengths(template, record, **keys) -> tuple[list[int], dict[str, int]]:
    counts: Counter[str] = Counter()
    found = list(template.documents(json.dumps(record), chat_of(template, **keys), counts))
    return [len(ids) for ids in found], counts


def test_a_long_conversation_is_cut_where_a_turn_begins_or_left_out_and_counted(small):
    template = small()
    (whole,), (first,) = (documents(template, {"messages": TWO["messages"][:n]}) for n in (4, 2))
    cut = len(first) - 1  # without the line break, which belongs to what follows
    for longest, length, was_cut in [
        (len(whole), len(whole), 0),
        (len(whole) - 1, len(whole) - 1, 0),
        (len(whole) - 2, cut, 1),
        (cut, cut, 1),
    ]:
        found, counts = lengths(template, TWO, max_length=longest)
        assert found == [length] and counts["cut"] == was_cut and counts["too_long"] == 0
    (found,) = documents(template, TWO, max_length=cut)
    assert found == whole[:cut] and found[-1] == template.end_of_turn
    assert lengths(template, TWO, max_length=cut - 1) == ([], {"too_long": 1})


def test_of_a_conversation_that_is_divided_each_document_is_left_out_by_itself(small):
    template = small("qwen3")
    (one, two), _ = lengths(template, TWO)
    found, counts = lengths(template, TWO, max_length=two - 2)
    assert found == [one] and counts["too_long"] == 1 and counts["cut"] == 0


def test_the_last_answer_is_not_cut_away_for_an_earlier_one_to_stay(small):
    template = small()
    (whole,) = documents(template, TWO, train_on="last")
    assert lengths(template, TWO, train_on="last", max_length=len(whole) - 2)[1]["too_long"] == 1
