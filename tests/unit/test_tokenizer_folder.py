"""Tokenizer folders in the forms that users have: the ids are those of the reference encoder, or the folder
is refused with the commands that help."""

import json
from pathlib import Path

import pytest
from support.corpora import HARD
from support.preparation import shared, small_bpe

from common.errors import UserError
from data.tokenizers.choice import open_or_download_tokenizer
from data.tokenizers.families import FAMILIES, open_family
from data.tokenizers.json_file import tokenizer_json
from data.tokenizers.tokenizer import open_tokenizer

TEXTS = [*HARD, "hello world", "Hello, 2024!", " one space first", "<|im_end|> <think>"]


def write_json(path: Path, content):
    path.write_text(json.dumps(content))


def test_a_folder_without_a_tokenizer_json_is_refused_with_what_makes_one(tmp_path):
    write_json(tmp_path / "vocab.json", {"a": 0})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"transformers writes a tokenizer.json, also from vocab.json"):
        open_tokenizer(str(tmp_path))


# --- tokens in the files beside a tokenizer ---

CONFIG, ADDED, MAP = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
DECODER = {
    "256": {"content": "<|endoftext|>", "special": True, **FLAGS},
    "257": {"content": "<|im_end|>", "special": True, **FLAGS},
}
SPECIAL = {
    "names": {
        CONFIG: {"eos_token": "<|im_end|>", "pad_token": "[PAD]", "additional_special_tokens": ["<x>"]}
    },
    "map": {ADDED: {"[PAD]": 257}, MAP: {"pad_token": {"content": "[PAD]", **FLAGS}, "bos_token": "a"}},
    "decoder": {CONFIG: {"pad_token": "[PAD]", "added_tokens_decoder": DECODER}},
    "repeated": {
        CONFIG: {"eos_token": "<|endoftext|>", "add_prefix_space": False},
        ADDED: {"<|endoftext|>": 256},
    },
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_tokens_of_other_files_change_no_id_of_a_text(tmp_path, case):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    path = small_bpe(tmp_path)
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, content in ({CONFIG: {}} | SPECIAL[case]).items():
        write_json(tmp_path / name, content | (fast if name == CONFIG else {}))
    ours, theirs = open_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "a b<x><|im_end|>[PAD] <|endoftext|>"
    options = {"split_special_tokens": True, "add_special_tokens": False, "truncation": False}
    assert ours.encode(text) == theirs.encode(text, **options)
    assert tokenizer_json(path) == path.read_text()


@pytest.mark.parametrize(
    "name, content, reason",
    [
        (ADDED, {"<x>": 300}, "adds '<x>' as 300, and the tokenizer has no such added token"),
        (ADDED, {"a": 64}, "adds 'a' as 64, and the tokenizer has no such added token"),
        (ADDED, {"<|endoftext|>": 300}, "as 300, and the tokenizer has it as 256"),
        (
            CONFIG,
            {"added_tokens_decoder": {"257": {"content": "<x>", "special": False}}},
            "adds '<x>' as 257",
        ),
        (
            CONFIG,
            {"add_prefix_space": True},
            "says add_prefix_space=True, and tokenizer.json add_prefix_space=False",
        ),
    ],
)
def test_files_that_add_what_the_tokenizer_does_not_know_are_refused(tmp_path, name, content, reason):
    path = small_bpe(tmp_path)
    write_json(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        open_tokenizer(str(tmp_path))
    assert reason in str(caught.value) and str(path) in str(caught.value)
    assert "Save it again, as one tokenizer.json, with transformers" in str(caught.value)


# --- the file itself ---


def test_dropout_is_off_so_the_same_text_always_gets_the_same_ids(tmp_path, capsys):
    path = small_bpe(tmp_path)
    content = json.loads(path.read_text())
    content["model"] |= {"merges": [["a", "b"]], "vocab": content["model"]["vocab"] | {"ab": 300}}
    content["model"]["dropout"] = 0.5
    write_json(path, content)
    tokenizer = open_tokenizer(str(path))
    assert capsys.readouterr().out.count("BPE dropout (0.5)") == 1
    assert all(tokenizer.encode("abab" * 20) == [300] * 40 for _ in range(5))


def test_hf_before_a_folder_names_the_folder(tmp_path, monkeypatch):
    path = small_bpe(tmp_path / "small")
    for name in (f"hf:{path.parent}", f"hf:{path}"):
        assert open_tokenizer(name).vocab_size == open_or_download_tokenizer(name).vocab_size == 257
    with pytest.raises(UserError, match="--tokenizer is empty"):
        open_or_download_tokenizer("hf:")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        UserError, match="there is no folder .*none, and the tokenizer of .* not be downloaded"
    ):
        open_or_download_tokenizer(f"hf:{tmp_path}/none")


def as_transformers_5_saves(source: Path, folder: Path) -> Path:
    content = json.loads(source.read_text())
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    folder.mkdir()
    write_json(folder / "tokenizer.json", content | {"normalizer": None, "pre_tokenizer": metaspace})
    return folder


def test_llama2_as_transformers_5_saves_it_keeps_sentencepieces_space_before_a_text(tmp_path):
    source = shared("tokenizers/hf/llama2/tokenizer.json")
    folder = as_transformers_5_saves(source, tmp_path / "llama2")
    ours = open_family(FAMILIES["llama"], str(folder))
    published = open_tokenizer(str(source))
    assert [ours.encode(text) for text in TEXTS] == [published.encode(text) for text in TEXTS]
    other = as_transformers_5_saves(small_bpe(tmp_path / "bpe"), tmp_path / "other")
    from tokenizers import Tokenizer

    asked = Tokenizer.from_file(str(other / "tokenizer.json"))
    assert open_tokenizer(str(other)).encode(" a b") == asked.encode(" a b").ids  # not LLaMA 2: as it says


@pytest.mark.parametrize(
    "family, before, after",
    [
        ("qwen3", '"normalizer": {"type": "NFC"}', '"normalizer": null'),
        ("llama3", r"\\p{N}{1,3}", r"\\p{N}"),
        ("llama3", r"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", r" ?\\p{L}+"),
        ("qwen3", r"[^\\s\\p{L}\\p{N}]+[\\r\\n]*", r"[^\\s\\p{L}\\p{N}]+"),
    ],
)
def test_a_tokenizer_with_the_right_vocabulary_and_another_rule_is_refused(tmp_path, family, before, after):
    content = json.loads(shared(f"tokenizers/hf/{family}/tokenizer.json").read_text())
    text = json.dumps(content, ensure_ascii=False)
    assert before in text
    (tmp_path / "tokenizer.json").write_text(text.replace(before, after))
    with pytest.raises(UserError, match="is not the tokenizer of this dataset"):
        open_family(FAMILIES[family], str(tmp_path))
