"""data/tokenizers/fast_encoder.py: the ids of the tokenizers library, or a refusal."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.corpora import HARD, make, tokens_and_meta
from support.preparation import shared, small_bpe, write_jsonl

pytest.importorskip("tiktoken")
from tokenizers import Tokenizer  # noqa: E402

from data.pipeline import preparation  # noqa: E402
from data.tokenizers import fast_encoder  # noqa: E402
from data.tokenizers.fast_encoder import (  # noqa: E402
    LLAMA3_PATTERN,
    QWEN_PATTERN,
    FastEncoder,
    Unsuitable,
    use_fast_encoder,
    verify_words,
    word_pattern,
)
from data.tokenizers.file_tokenizer import FileTokenizer  # noqa: E402
from data.tokenizers.tokenizer import open_tokenizer  # noqa: E402

FILES = ["hf/gpt2", "hf/llama2", "hf/qwen3"]  # the merges of LLaMA 3's do not make each of its tokens
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


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def random_texts(count: int, length: int) -> list[str]:
    """Words, spaces of all kinds, digits, marks that combine, and characters from everywhere."""
    rng = np.random.default_rng(0)
    common = list("aeiou    \n\n\r\t'.,!12390\u00a0\u3000\u0301\u0323\u1100\u1161sSltrevdmT\u2581")
    anywhere = [chr(code) for code in rng.integers(0x21, 0x323B0, 4000) if not 0xD800 <= code < 0xE000]
    return ["".join(rng.choice(common + anywhere[i : i + 20], length)) for i in range(count)]


def byte_file(tmp_path: Path, **changes) -> Tokenizer:
    """small_bpe with two merges: ab, abc."""
    content = json.loads(small_bpe(tmp_path).read_text())
    content["model"]["vocab"] |= {"ab": 300, "abc": 301}
    content["model"]["merges"] = [["a", "b"], ["ab", "c"]]
    content["model"] |= changes.pop("model", {})
    return Tokenizer.from_str(json.dumps(content | changes))


# --- equality ---


@pytest.mark.parametrize("name", FILES)
def test_ids_are_those_of_the_library(name):
    tokenizer = open_tokenizer(str(shared(f"tokenizers/{name}")))
    prose = shared("text/tinyshakespeare.txt").read_text()[:50_000]
    texts = [*ODD, prose, *random_texts(200, 150)]
    library = tokenizer.encode_arrays(texts)
    fast = FastEncoder(tokenizer.tokenizer)
    fast._verify_merges()
    made = [fast.encode(text) for text in texts]
    assert sum(ids is None for ids in made) <= 1  # <think> is an added token of Qwen3
    assert all(a is None or np.array_equal(a, b) for a, b in zip(made, library, strict=True))


def test_what_the_fast_encoder_leaves_to_the_library_keeps_its_place(tmp_path):
    added = [{"id": 400, "content": "<think>", "special": False, **dict.fromkeys(FLAGS, False)}]
    path = tmp_path / "file.json"
    byte_file(tmp_path, normalizer={"type": "NFC"}, added_tokens=added).save(str(path))
    tokenizer = FileTokenizer(path)
    texts = ["one", "a <think> b", "two", "\u212a<think\u1fef>", "x" + " " * 1_300_000 + "y", ""]
    library = [ids.tolist() for ids in tokenizer.encode_arrays(texts)]
    assert use_fast_encoder(tokenizer, verify=False)
    left = [tokenizer.fast(text) is None for text in texts]
    assert left == [False, True, False, False, True, False]
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts)] == library
    assert tokenizer.encode("a <think> b") == library[1]


def test_a_dataset_has_the_same_bytes_by_either_encoder(tmp_path, monkeypatch, capsys):
    bpe = small_bpe(tmp_path / "bpe")
    files = [write_jsonl(tmp_path / "a.jsonl", [*ODD, *random_texts(50, 300)])]
    make(files, tmp_path / "library", bpe)
    assert "ids are made" not in capsys.readouterr().out
    monkeypatch.setattr(preparation, "FAST_BYTES", 0)
    monkeypatch.setattr(fast_encoder, "CHARACTERS", range(0x2200))
    make(files, tmp_path / "fast", bpe)
    assert "ids are made by tiktoken's loop" in capsys.readouterr().out
    assert tokens_and_meta(tmp_path / "fast") == tokens_and_meta(tmp_path / "library")


# --- refusal ---


def test_merges_that_leave_out_a_way_to_a_token_are_refused(tmp_path):
    vocab = json.loads(byte_file(tmp_path).to_str())["model"]["vocab"] | {"bc": 302}
    merges = [["a", "b"], ["b", "c"], ["a", "bc"]]
    tokenizer = byte_file(tmp_path, model={"merges": merges, "vocab": vocab})
    # a, b, c becomes ab, c; the library has no merge of these two, but their join is a token
    assert tokenizer.encode("abc").ids != FastEncoder(tokenizer).encode("abc").tolist()
    with pytest.raises(Unsuitable, match="do not make its token"):
        FastEncoder(tokenizer)._verify_merges()
    FastEncoder(byte_file(tmp_path))._verify_merges()


def test_words_that_are_tokens_without_merges_are_taken_only_if_no_merge_would_make_them(tmp_path):
    options = {"ignore_merges": True, "merges": [["a", "b"]]}  # abc only as a whole word
    with pytest.raises(Unsuitable, match="do not make its token 'abc'"):
        FastEncoder(byte_file(tmp_path, model=options))._verify_merges()
    vocab = json.loads(byte_file(tmp_path).to_str())["model"]["vocab"]
    vocab["xyz"] = vocab.pop("abc")  # no pair of tokens makes it
    tokenizer = byte_file(tmp_path, model=options | {"vocab": vocab})
    fast = FastEncoder(tokenizer)
    fast._verify_merges()
    for text in ("xyz", "xyzz", "abxyz", " xyz"):
        assert fast.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


APART = {"bc": 302}, [["a", "b"], ["ab", "c"], ["b", "c"], ["a", "bc"]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "cuts words in a way of its own"),
        ({"pre_tokenizer": None}, "cuts words in a way of its own"),
        ({"normalizer": {"type": "Lowercase"}}, "changes the text in a way of its own"),
        ({"model": {"dropout": 0.1}}, "not a plain byte-pair encoder"),
        (APART, "ranks the merges to one token apart"),  # with others between
    ],
    ids=str,
)
def test_a_file_of_another_kind_is_refused(tmp_path, changes, reason):
    if changes is APART:
        vocab = json.loads(byte_file(tmp_path).to_str())["model"]["vocab"] | APART[0]
        changes = {"model": {"vocab": vocab, "merges": APART[1]}}
    with pytest.raises(Unsuitable, match=reason):
        FastEncoder(byte_file(tmp_path, **changes))


@pytest.mark.parametrize(
    "changed",
    [
        (
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            r"[^\r\n\p{L}\p{N}]?[\p{L}--\u1e9e]+",
        ),  # a letter that one does not know
        (r"\p{N}", r"[\p{N}--\U0001fbf9]"),  # a digit
        ("(?i:'s", "(?:'s"),  # the other forms of s
    ],
    ids=["letter", "digit", "contraction"],
)
def test_libraries_that_disagree_on_one_character_are_found(changed, monkeypatch):
    monkeypatch.setattr(fast_encoder, "CHARACTERS", [*range(0x2200), 0x1FBF9])
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": LLAMA3_PATTERN}, "behavior": "Isolated", "invert": False}
    content = {"type": "Sequence", "pretokenizers": [split, level]}
    file = {"version": "1.0", "pre_tokenizer": content, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    cuts = Tokenizer.from_str(json.dumps(file)).pre_tokenizer
    assert word_pattern(content) == LLAMA3_PATTERN != QWEN_PATTERN
    with pytest.raises(Unsuitable, match="differ on a character"):
        verify_words(cuts, LLAMA3_PATTERN.replace(*changed))


def test_a_refused_file_keeps_its_library(tmp_path, capsys):
    path = tmp_path / "tokenizer.json"
    byte_file(tmp_path, normalizer={"type": "Lowercase"}).save(str(path))
    tokenizer = FileTokenizer(path)
    assert not use_fast_encoder(tokenizer)
    assert "the faster way is not certain, as it changes the text" in capsys.readouterr().out
    assert tokenizer.encode("AB") == tokenizer.encode("ab")
