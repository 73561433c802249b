"""Tokenizer folders in the forms that users have: the ids are those of the reference encoder, or the folder
is refused with the commands that help."""

import json
from pathlib import Path

import pytest
from support.corpora import HARD
from support.preparation import shared, small_bpe
from support.sentencepiece_files import write_model

from common.errors import UserError
from data.tokenizers.choice import open_or_download_tokenizer
from data.tokenizers.families import FAMILIES, open_family
from data.tokenizers.fast_encoder import use_fast_encoder
from data.tokenizers.file_tokenizer import tokenizer_json
from data.tokenizers.tokenizer import open_tokenizer

TEXTS = [*HARD, "hello world", "Hello, 2024!", " one space first", "<|im_end|> <think>"]


def write_json(path: Path, content: dict):
    path.write_text(json.dumps(content))


def test_a_folder_without_a_tokenizer_json_is_refused_with_what_makes_one(tmp_path):
    write_json(tmp_path / "vocab.json", {"a": 0})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(UserError, match=r"transformers writes a tokenizer.json, also from vocab.json"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(UserError, match="it lists ranks, as that of LLaMA 3 does"):
        open_tokenizer(str(tmp_path))


# --- tokens in the files beside a tokenizer ---

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
BESIDE = {
    "added_tokens": {"added_tokens.json": {"<|im_start|>": 257, "<|im_end|>": 258}},
    "names": {
        "tokenizer_config.json": FAST
        | {"eos_token": "<|im_end|>", "pad_token": "[PAD]", "additional_special_tokens": ["<x>"]}
    },
    "map": {
        "tokenizer_config.json": FAST,
        "special_tokens_map.json": {"pad_token": {"content": "[PAD]", **PLAIN}, "bos_token": "a"},
    },
    "decoder": {
        "tokenizer_config.json": FAST
        | {
            "pad_token": "[PAD]",
            "added_tokens_decoder": {
                "256": {"content": "<|endoftext|>", "special": True, **PLAIN},
                "258": {"content": "<x>", "special": False, **PLAIN},
                "257": {"content": "<|im_end|>", "special": True, **PLAIN},
            },
        }
    },
}


@pytest.mark.parametrize("case", BESIDE)
def test_added_tokens_of_the_other_files_are_counted_as_transformers_counts_them(tmp_path, case):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    small_bpe(tmp_path)
    for name, content in ({"tokenizer_config.json": FAST} | BESIDE[case]).items():
        write_json(tmp_path / name, content)
    ours, theirs = open_tokenizer(str(tmp_path)), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) > 257
    for token in ("<|im_start|>", "<|im_end|>", "[PAD]", "<x>"):
        assert ours.token_id(token) == theirs.get_vocab().get(token)
    text = "a b<x><|im_end|>[PAD] <|im_start|>"
    options = {"split_special_tokens": True, "add_special_tokens": False, "truncation": False}
    assert ours.encode(text) == theirs.encode(text, **options)
    kept = json.loads(tokenizer_json(tmp_path / "tokenizer.json"))  # that of a dataset has them all
    assert [token["id"] for token in kept["added_tokens"]][-1] == ours.vocab_size - 1


def test_a_tokenizer_model_has_the_added_tokens_of_its_folder_too(tmp_path):
    write_model(tmp_path)
    write_json(tmp_path / "added_tokens.json", {"<pad>": 1000})
    tokenizer = open_tokenizer(str(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.token_id("<pad>")) == (1001, 1000)


def test_a_tokenizer_with_all_tokens_in_its_own_file_is_read_byte_for_byte(tmp_path):
    path = small_bpe(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", FAST | {"eos_token": "<|endoftext|>"})
    write_json(tmp_path / "added_tokens.json", {"<|endoftext|>": 256})
    assert tokenizer_json(path) == path.read_text()


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("added_tokens.json", {"<x>": 300}, "'<x>' should have 300, and would get 257"),
        ("added_tokens.json", {"a": 3}, "'a' should have 3, and would get "),
        (
            "tokenizer_config.json",
            {"add_prefix_space": True},
            "add_prefix_space=True, and the step ByteLevel",
        ),
        ("tokenizer_config.json", ["a"], "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "cannot be read as one tokenizer"),
    ],
)
def test_files_that_contradict_the_tokenizer_are_refused(tmp_path, name, content, reason):
    small_bpe(tmp_path)
    write_json(tmp_path / name, content)
    with pytest.raises(UserError) as caught:
        open_tokenizer(str(tmp_path))
    assert reason in str(caught.value) and str(tmp_path) in str(caught.value)


def test_dropout_is_off_so_the_same_text_always_gets_the_same_ids(tmp_path, capsys):
    path = small_bpe(tmp_path)
    content = json.loads(path.read_text())
    content["model"] |= {"merges": [["a", "b"]], "vocab": content["model"]["vocab"] | {"ab": 300}}
    write_json(path, content)
    plain = open_tokenizer(str(path)).encode("abab" * 20)
    content["model"]["dropout"] = 0.5
    write_json(path, content)
    tokenizer = open_tokenizer(str(path))
    assert capsys.readouterr().out.count("BPE dropout (0.5)") == 1
    assert plain == [300] * 40 and all(tokenizer.encode("abab" * 20) == plain for _ in range(5))
    assert use_fast_encoder(tokenizer, verify=False) and tokenizer.encode("abab" * 20) == plain


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
