"""The fastokens library makes the ids of the tokenizers library, or the preparation stops."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from support.corpora import HARD, make, tokens_and_meta
from support.preparation import shared, small_bpe, write_jsonl

pytest.importorskip("fastokens", reason="needs fastokens, of requirements/data.txt")
from common.errors import UserError  # noqa: E402
from data.pipeline import preparation  # noqa: E402
from data.tokenizers.file_tokenizer import CHECKED_FIRST, FileTokenizer, use_fastokens  # noqa: E402
from data.tokenizers.json_file import added_token  # noqa: E402
from data.tokenizers.tokenizer import open_tokenizer  # noqa: E402

ODD = [
    *HARD,
    "",
    " ",
    "\u2581\u2581 a\u2581b",
    "\u212a\u037e",
    "\U0001f9ff\U00020bb7\u9fff",
    "<0x0A>\n<think>",
]


def random_texts(count: int, length: int) -> list[str]:
    """Words, spaces of all kinds, digits, marks that combine, and characters from everywhere."""
    rng = np.random.default_rng(0)
    common = list("aeiou    \n\n\r\t'.,!12390\u00a0\u3000\u0301\u0323\u1100\u1161sSltrevdmT\u2581")
    anywhere = [chr(code) for code in rng.integers(0x21, 0x323B0, 4000) if not 0xD800 <= code < 0xE000]
    return ["".join(rng.choice(common + anywhere[i : i + 20], length)) for i in range(count)]


def encoded(tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_arrays(texts)]


@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3", "qwen3"])
def test_ids_are_those_of_the_library(name):
    tokenizer = open_tokenizer(str(shared(f"tokenizers/hf/{name}")))
    texts = [*ODD, shared("text/tinyshakespeare.txt").read_text()[:50_000], *random_texts(200, 150)]
    library = encoded(tokenizer, texts)
    assert use_fastokens(tokenizer)
    tokenizer.encoded = CHECKED_FIRST + 1  # so that nothing is compared by the tokenizer itself
    assert encoded(tokenizer, texts) == library


@pytest.fixture
def own(tmp_path) -> FileTokenizer:
    """small_bpe with a merge of ab, NFC, dropout, and the added token <think>."""
    content = json.loads(small_bpe(tmp_path).read_text()) | {"normalizer": {"type": "NFC"}}
    content["model"] |= {
        "vocab": content["model"]["vocab"] | {"ab": 256},
        "merges": [["a", "b"]],
        "dropout": 0.5,
    }
    content["added_tokens"] = [added_token(257, "<|endoftext|>"), added_token(258, "<think>", special=False)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return FileTokenizer(tmp_path / "tokenizer.json")


def test_special_tokens_added_tokens_and_dropout_are_as_in_the_library(own):
    texts = [
        "ab" * 20,
        "a <think> b",
        "<|endoftext|>",
        "\u212a<think\u1fef>",
        "x" + " " * 1_300_000 + "y",
        "",
    ]
    library = encoded(own, texts)
    assert library[:2] == [[256] * 20, [64, 220, 258, 220, 65]] and len(library[2]) == 13
    assert use_fastokens(own) and encoded(own, texts) == library


def test_a_dataset_has_the_same_bytes_by_either_library(tmp_path, monkeypatch, capsys):
    bpe = small_bpe(tmp_path / "bpe")
    files = [write_jsonl(tmp_path / "a.jsonl", [*ODD, *random_texts(50, 300)])]
    make(files, tmp_path / "small", bpe)
    assert "ids are made" not in capsys.readouterr().out
    monkeypatch.setattr(preparation, "FAST_BYTES", 0)
    make(files, tmp_path / "fast", bpe)
    assert "ids are made by fastokens; the first texts, and one in 256" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "fastokens", None)
    make(files, tmp_path / "without", bpe)
    assert "fastokens makes the same many times as fast: pip install -r" in capsys.readouterr().out
    for name in ("fast", "without"):
        assert tokens_and_meta(tmp_path / name) == tokens_and_meta(tmp_path / "small")


@pytest.mark.parametrize("number, found", [(0, True), (CHECKED_FIRST - 1, True), (300, False), (512, True)])
def test_other_ids_are_an_error_that_says_what_to_do(own, number, found):
    assert use_fastokens(own)
    right = own.fast.encode_batch_flat

    def wrong(texts, **options):
        return right([text.replace("mark", "marks") for text in texts], **options)

    own.fast = SimpleNamespace(encode_batch_flat=wrong)
    texts = ["a text"] * number + ["a text with a mark"] + ["a text"] * 50
    batches = [texts[start : start + 50] for start in range(0, len(texts), 50)]
    expected = pytest.raises(UserError, match="ids of the text 'a text with a mark'.*pip uninstall fastokens")
    with expected if found else nullcontext():
        for batch in batches:
            own.encode_arrays(batch)


def test_a_kind_that_fastokens_does_not_know_is_left_to_the_library(tmp_path, capsys):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (tmp_path / "a.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = FileTokenizer(tmp_path / "a.json")
    assert not use_fastokens(tokenizer) and tokenizer.encode("b") == [1]
    assert "ids are made by tokenizers, as fastokens cannot read" in capsys.readouterr().out
