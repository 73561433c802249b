"""The fastokens library makes the ids of the tokenizers library, or the preparation stops."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.corpora import HARD, make, tokens_and_meta
from support.preparation import shared, small_bpe, write_jsonl

pytest.importorskip("fastokens", reason="needs fastokens, of requirements-data.txt")
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
    "a<think>b",
    "\u212a\u037e",
    "\U0001f9ff\U00020bb7\u9fff",
    "<0x0A>\n",
]


def random_texts(count: int, length: int) -> list[str]:
    """Words, spaces of all kinds, digits, marks that combine, and characters from everywhere."""
    rng = np.random.default_rng(0)
    common = list("aeiou    \n\n\r\t'.,!12390\u00a0\u3000\u0301\u0323\u1100\u1161sSltrevdmT\u2581")
    anywhere = [chr(code) for code in rng.integers(0x21, 0x323B0, 4000) if not 0xD800 <= code < 0xE000]
    return ["".join(rng.choice(common + anywhere[i : i + 20], length)) for i in range(count)]


def encoded(tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_arrays(texts)]


def own_file(folder: Path, **model) -> FileTokenizer:
    """small_bpe with a merge of ab, NFC, and the added token <think>."""
    content = json.loads(small_bpe(folder).read_text())
    content["model"] |= {"vocab": content["model"]["vocab"] | {"ab": 256}, "merges": [["a", "b"]]} | model
    content["added_tokens"] = [added_token(257, "<|endoftext|>"), added_token(258, "<think>", special=False)]
    (folder / "tokenizer.json").write_text(json.dumps(content | {"normalizer": {"type": "NFC"}}))
    return FileTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3", "qwen3"])
def test_ids_are_those_of_the_library(name):
    tokenizer = open_tokenizer(str(shared(f"tokenizers/hf/{name}")))
    prose = shared("text/tinyshakespeare.txt").read_text()[:50_000]
    texts = [*ODD, prose, *random_texts(200, 150)]
    library = encoded(tokenizer, texts)
    assert use_fastokens(tokenizer)
    tokenizer.encoded = CHECKED_FIRST + 1  # so that nothing is compared by the tokenizer itself
    assert encoded(tokenizer, texts) == library


def test_special_tokens_added_tokens_and_dropout_are_as_in_the_library(tmp_path):
    tokenizer = own_file(tmp_path, dropout=0.5)
    texts = [
        "ab" * 20,
        "a <think> b",
        "<|endoftext|>",
        "e\u0301\u212a<think\u1fef>",
        "x" + " " * 1_300_000 + "y",
        "",
    ]
    library = encoded(tokenizer, texts)
    assert library[:2] == [[256] * 20, [64, 220, 258, 220, 65]] and len(library[2]) == 13
    assert use_fastokens(tokenizer) and encoded(tokenizer, texts) == library


def test_a_dataset_has_the_same_bytes_by_either_library(tmp_path, monkeypatch, capsys):
    bpe = small_bpe(tmp_path / "bpe")
    files = [write_jsonl(tmp_path / "a.jsonl", [*ODD, *random_texts(50, 300)])]
    make(files, tmp_path / "library", bpe)
    assert "ids are made" not in capsys.readouterr().out  # a small input
    monkeypatch.setattr(preparation, "FAST_BYTES", 0)
    make(files, tmp_path / "fast", bpe)
    assert "ids are made by fastokens; the first texts, and one in 256" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "fastokens", None)
    make(files, tmp_path / "without", bpe)
    assert "fastokens makes the same many times as fast: pip install -r" in capsys.readouterr().out
    assert tokens_and_meta(tmp_path / "fast") == tokens_and_meta(tmp_path / "library")
    assert tokens_and_meta(tmp_path / "without") == tokens_and_meta(tmp_path / "library")


class Wrong:
    """Makes one id too many of every text with the mark."""

    def __init__(self, fast):
        self.fast = fast

    def encode_batch_flat(self, texts, **options):
        return self.fast.encode_batch_flat([text + "a" * ("mark" in text) for text in texts], **options)


@pytest.mark.parametrize("number, found", [(0, True), (CHECKED_FIRST - 1, True), (300, False), (512, True)])
def test_other_ids_are_an_error_that_says_what_to_do(tmp_path, number, found):
    tokenizer = own_file(tmp_path)
    assert use_fastokens(tokenizer)
    tokenizer.fast = Wrong(tokenizer.fast)
    texts = ["a text"] * 600
    texts[number] = "a text with a mark"
    if not found:
        assert len(encoded(tokenizer, texts)) == 600
        return
    with pytest.raises(
        UserError, match="different ids of the text 'a text with a mark'.*pip uninstall fastokens"
    ):
        for start in range(0, 600, 50):
            tokenizer.encode_arrays(texts[start : start + 50])


def test_a_kind_that_fastokens_does_not_know_is_left_to_the_library(tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    tokenizer = FileTokenizer(path)
    assert not use_fastokens(tokenizer)
    assert "ids are made by tokenizers, as fastokens cannot read" in capsys.readouterr().out
    assert tokenizer.encode("b") == [1]
