"""A tokenizer.model of SentencePiece gives the ids of that library, or a setting is refused by its name."""

import json

import pytest
from support.sentencepiece_files import FOLDER, NORMALIZER, READ, TEXTS, TRAINER, write_model

from common.errors import UserError
from data.tokenizers.fast_encoder import use_fast_encoder
from data.tokenizers.model_file import UNUSED, USER_DEFINED
from data.tokenizers.tokenizer import open_tokenizer

EXPECTED = json.loads((FOLDER / "expected.json").read_text())  # by sentencepiece 0.2.3


@pytest.mark.parametrize("name", READ)
def test_the_ids_are_those_of_the_library_with_these_settings(tmp_path, name):
    normalizer, types = READ[name]
    write_model(tmp_path, normalizer, types)
    tokenizer = open_tokenizer(str(tmp_path))
    assert {text: tokenizer.encode(text) for text in TEXTS} == dict(zip(TEXTS, EXPECTED[name], strict=True))
    assert tokenizer.decode(tokenizer.encode("First  Citizen: naïve")).split() == [
        "First",
        "Citizen:",
        "naïve",
    ]


def test_the_usual_settings_are_still_encoded_the_fast_way(tmp_path):
    write_model(tmp_path)
    tokenizer = open_tokenizer(str(tmp_path))
    assert use_fast_encoder(tokenizer)
    assert [tokenizer.encode(text) for text in TEXTS] == EXPECTED["as LLaMA's"]


SYMBOL = {"[SYM]": USER_DEFINED}
NO_PREFIX = {**NORMALIZER, 3: 0}
REFUSED = {
    "normalization_rule_name=nmt_nfkc has a character map": {"normalizer": {1: b"nmt_nfkc", 2: b"\0" * 8}},
    "the denormalizer has a character map": {"denormalizer": {2: b"\0" * 8}},
    "model_type is not BPE": {"trainer": {**TRAINER, 3: 1}},
    "treat_whitespace_as_suffix=true": {"trainer": {**TRAINER, 24: 1}},
    "escape_whitespaces=false": {"normalizer": {**NORMALIZER, 5: 0}},
    "byte_fallback=false beside pieces for bytes": {"trainer": {3: 2}},
    "it has unused pieces": {"types": {"First": UNUSED}},
    "user_defined_symbols beside add_dummy_prefix": {"types": SYMBOL},
    "or remove_extra_whitespaces": {"types": SYMBOL, "normalizer": {1: b"identity", 3: 0}},
    "user_defined_symbols with a space": {"types": {"a b": USER_DEFINED}, "normalizer": NO_PREFIX},
    "several of its pieces have one score": {"scores": {"he": 0.5, "el": 0.5}},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_a_setting_that_cannot_be_followed_is_refused_by_its_name(tmp_path, setting):
    path = write_model(tmp_path, **REFUSED[setting])
    with pytest.raises(UserError) as caught:
        open_tokenizer(str(tmp_path))
    assert str(path) in str(caught.value) and setting in str(caught.value)
    assert "a tokenizer.json beside it" in str(caught.value)
