"""generation/text.py and generation/chat.py: ids to text as they are made, and chat templates."""

import json

import pytest
import torch

from common.errors import UserError
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.to_file import write_tokenizer
from generation.chat import apply_template
from generation.text import TextStream


class Bytes:
    """A tokenizer with one id for each byte; 256 is past its vocabulary."""

    def decode(self, ids):
        return bytes(one for one in ids if one < 256).decode("utf-8", errors="replace")


class Words:
    """A tokenizer that drops the space in front of the first token, as LLaMA 2's does."""

    def decode(self, ids):
        return "".join(f" word{one}" for one in ids).removeprefix(" ")


def pieces(stream, ids):
    return [*(stream.add(one) for one in ids), stream.end()]


def test_a_character_of_several_tokens_appears_when_it_is_whole():
    text = "naïve 東👩‍👩‍👧!"
    found = pieces(TextStream(Bytes(), list(b"a ")), text.encode())
    assert "".join(found) == text
    assert "\ufffd" not in "".join(found)
    assert found[:4] == ["n", "a", "", "ï"]


def test_bytes_that_are_no_text_are_shown_as_the_tokenizer_shows_them():
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        ids = torch.randint(0x60, 257, (30,), generator=generator).tolist()
        assert "".join(pieces(TextStream(Bytes(), [65]), ids)) == Bytes().decode(ids)
    assert pieces(TextStream(Bytes(), [65]), [0xE6, 0x9D]) == ["", "", "\ufffd"]


def test_the_space_in_front_of_a_word_stays():
    assert pieces(TextStream(Words(), [1, 2]), [3, 4]) == [" word3", " word4", ""]


# --- chat templates ---

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
