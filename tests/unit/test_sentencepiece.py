"""A tokenizer.model: ids by the sentencepiece library, and the tokenizer.json that says the same."""

import json
import sys

import pytest
from support.corpora import HARD
from support.preparation import shared
from support.sentencepiece_files import FOLDER, READ, TEXTS, TRAINER, write_model

pytest.importorskip("sentencepiece", reason="needs sentencepiece, of requirements/data.txt")
from common.errors import UserError  # noqa: E402
from data.tokenizers.to_file import write_tokenizer  # noqa: E402
from data.tokenizers.tokenizer import hash_tokenizer, keep_tokenizer, open_recorded_tokenizer, open_tokenizer  # noqa: E402  # noqa: E402
from training.batches.sources import same_tokenizer, tokenizer_identity  # noqa: E402

EXPECTED = json.loads((FOLDER / "expected.json").read_text())  # by sentencepiece 0.2.3
# Of datasets that were made when a tokenizer.json was made of the file: the first digits of their hashes.
BEFORE = {
    "as LLaMA's": "197eb1584d95",
    "remove_extra_whitespaces": "4ececccdca89",
    "no add_dummy_prefix": "e8607f7b3419",
    "neither": "cdbeeb49308f",
    "a symbol of one character": "94083ba55f1d",
}
WITH_JSON = [name for name in READ if name in BEFORE]
NO_JSON = {
    "symbols": {"normalizer": READ["user_defined_symbols"][0], "types": READ["user_defined_symbols"][1]},
    "unigram": {"trainer": {**TRAINER, "model_type": 1}},
}


@pytest.mark.parametrize("name", READ)
def test_the_ids_are_those_of_the_library_with_these_settings(tmp_path, name):
    write_model(tmp_path, *READ[name])
    tokenizer = open_tokenizer(str(tmp_path))
    assert {text: tokenizer.encode(text) for text in TEXTS} == dict(zip(TEXTS, EXPECTED[name], strict=True))
    assert [ids.tolist() for ids in tokenizer.encode_arrays(TEXTS)] == EXPECTED[name]
    words = tokenizer.decode(
        [*tokenizer.encode("First  Citizen: naïve"), 1000]
    ).split()  # models pad their ids
    assert words == ["First", "Citizen:", "naïve"]
    assert tokenizer.decode([1, *EXPECTED[name][0], 2, *EXPECTED[name][0]]) == "<s>hello world</s>hello world"
    assert tokenizer.token_id("</s>") == 2 and tokenizer.token_id("no piece") is None


@pytest.mark.parametrize("name", WITH_JSON)
def test_a_tokenizer_json_says_the_same_and_its_hash_is_that_of_datasets_from_before(tmp_path, name):
    write_model(tmp_path / "model", *READ[name])
    tokenizer = open_tokenizer(str(tmp_path / "model"))
    (tmp_path / "json").mkdir()
    write_tokenizer(tmp_path / "json", tokenizer, 2)
    written = open_tokenizer(str(tmp_path / "json"))
    assert [written.encode(text) for text in TEXTS] == EXPECTED[name]
    assert hash_tokenizer(tokenizer) == hash_tokenizer(written)
    assert hash_tokenizer(tokenizer).startswith(BEFORE[name])


@pytest.mark.parametrize("name", NO_JSON)
def test_settings_that_no_tokenizer_json_has_are_applied_and_exported_as_they_are(tmp_path, name, capsys):
    path = write_model(tmp_path / "model", **NO_JSON[name])
    tokenizer = open_tokenizer(str(path))
    write_tokenizer(tmp_path, tokenizer, 2)
    assert (tmp_path / "tokenizer.model").read_bytes() == path.read_bytes()
    assert not (tmp_path / "tokenizer.json").exists()
    assert "transformers may encode a text otherwise" in capsys.readouterr().out


def test_llama_2_of_either_file_is_one_tokenizer_also_for_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    tokenizer = open_tokenizer(str(shared("tokenizers/llama2")))
    assert hash_tokenizer(tokenizer).startswith("a72ba6448cd1")  # of datasets and runs from before
    published, prose = (shared(name) for name in ("tokenizers/hf/llama2", "text/tinyshakespeare.txt"))
    texts = [*HARD, prose.read_text()[:100_000]]
    assert [open_tokenizer(str(published)).encode(text) for text in texts] == list(
        map(tokenizer.encode, texts)
    )
    assert all(2 not in tokenizer.encode(text) for text in texts)  # HARD spells </s>
    write_tokenizer(tmp_path, tokenizer, 2)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == 2
    for text in [text for text in TEXTS if "s>" not in text]:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)


def test_a_dataset_keeps_the_file_and_opens_it_again(tmp_path):
    write_model(tmp_path / "model")
    tokenizer = open_tokenizer(str(tmp_path / "model"))
    (tmp_path / "data").mkdir()
    recorded = keep_tokenizer(tmp_path / "data", tokenizer)
    assert open_recorded_tokenizer(recorded, tmp_path / "data").encode(TEXTS[0]) == EXPECTED["as LLaMA's"][0]
    old = {"kind": "tokenizers", "file": "tokenizer.json", "sha256": hash_tokenizer(tokenizer)}
    assert same_tokenizer(tokenizer_identity(recorded), tokenizer_identity(old))
    path = tmp_path / "data" / "tokenizer.model"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(UserError, match="has changed since the tokens were made with it"):
        open_recorded_tokenizer(recorded, tmp_path / "data")


def test_without_the_library_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    path = write_model(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=f"{path} needs the sentencepiece library: pip install sentencepiece"):
        open_tokenizer(str(tmp_path))
