"""Prompts in chat templates."""

import json

import pytest

from common.errors import UserError
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.to_file import write_tokenizer
from generation.source import apply_template

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<a>{% endif %}"
CHARS = "<>abchiu!"


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    write_tokenizer(tmp_path, CharTokenizer(CHARS), None)
    return tmp_path


def set_config(folder, **keys):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_prompt_is_put_into_the_template_of_its_folder(folder, place):
    if place == "chat_template.jinja":
        (folder / place).write_text(TEMPLATE)
    else:
        set_config(folder, chat_template=TEMPLATE)
    set_config(folder, eos_token="!")
    ids, ends = apply_template(folder, ["hi", "b"])
    assert ["".join(CHARS[one] for one in prompt) for prompt in ids] == ["<u>hi<a>", "<u>b<a>"]
    assert ends == {CHARS.index("!")}


def test_a_tokenizer_without_a_template_says_so(folder):
    with pytest.raises(
        UserError, match="^--chat: transformers cannot use a chat template of .*chat_template is not set"
    ):
        apply_template(folder, ["hi"])


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ raise_exception('no\nuser') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"],
)
def test_a_template_that_fails_is_one_message(folder, template):
    set_config(folder, chat_template=template)
    with pytest.raises(UserError, match="^--chat: transformers cannot use a chat template of [^\n]*$"):
        apply_template(folder, ["hi"])


def test_code_in_the_folder_of_a_tokenizer_is_never_run(folder):
    set_config(
        folder, chat_template=TEMPLATE, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]}
    )
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UserError, match="^--chat: transformers cannot use a chat template of "):
        apply_template(folder, ["hi"])


def test_a_special_token_that_a_prompt_spells_is_text(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [{"id": len(CHARS), "content": "<a>", "special": True, **flags}]
    path.write_text(json.dumps(content))
    set_config(folder, chat_template=TEMPLATE)
    ids, _ = apply_template(folder, ["<a>"])
    assert ids == [[CHARS.index(char) for char in "<u><a>"] + [len(CHARS)]]
