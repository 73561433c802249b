"""An exported folder has the tokenizer that made the tokens, and sample.py reads it."""

import json
import shutil
import subprocess
import sys

import pytest
from support.helpers import ROOT
from support.hf_models import VOCAB, hf_run, save
from support.preparation import SHARED_DATA, shared

import sample
from common.errors import UserError
from data.pipeline.meta_file import keep_tokenizer
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.to_file import write_tokenizer
from data.tokenizers.tokenizer import open_tokenizer
from tools import export_hf

CHARS = "".join(map(chr, range(48, 48 + VOCAB)))  # one for each id of the tiny models
TEXTS = [
    "Hello  world, 2024!\n\n\tnaïve été 東京 don't WE'LL 12345678   ",
    " one space first",
    "e\u0301cole caf\u00e9 \u1e9b\u0323\r\n\r\n x\u3000y 👩‍👩‍👧",
    "<|endoftext|> </s> <think>",
]


def transformers_tokenizer(folder):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    return transformers.AutoTokenizer.from_pretrained(folder)


# --- made from ours ---


def test_characters_become_a_tokenizer_with_the_same_ids(tmp_path):
    ours = CharTokenizer("\n abcé\U0001f600")
    write_tokenizer(tmp_path, ours, None)
    text = "a b\ncé\U0001f600 "
    theirs = transformers_tokenizer(tmp_path)
    assert theirs.encode(text) == open_tokenizer(str(tmp_path)).encode(text) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text


def test_a_file_tokenizer_is_written_as_it_is(tmp_path):
    (tmp_path / "a").mkdir()
    write_tokenizer(tmp_path / "a", CharTokenizer("abc"), None)
    (tmp_path / "b").mkdir()
    write_tokenizer(tmp_path / "b", open_tokenizer(str(tmp_path / "a")), None)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cl100k_base", "o200k_base")),
    ],
)
def test_an_encoding_of_tiktoken_becomes_a_tokenizer_with_the_same_ids(name, tmp_path, monkeypatch):
    shared("tiktoken_cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED_DATA / "tiktoken_cache"))
    try:
        ours = open_tokenizer(name)
    except UserError:
        pytest.skip(f"no test data: {name}")
    eot = ours.token_id("<|endoftext|>")
    write_tokenizer(tmp_path, ours, eot)
    theirs, again = transformers_tokenizer(tmp_path), open_tokenizer(str(tmp_path))
    assert theirs.eos_token == "<|endoftext|>" and theirs.eos_token_id == eot
    for text in TEXTS:
        assert again.encode(text) == ours.encode(text)
        plain = text.replace("<|endoftext|>", "")  # transformers takes it for the special token
        assert theirs.encode(plain) == ours.encode(plain)
        assert theirs.decode(ours.encode(text)) == text


# --- which one is exported ---


def test_that_of_the_dataset_goes_with_a_run_from_random_weights(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported"), "--checkpoint=best"])
    assert "tokenizer: that of the dataset" in capsys.readouterr().out
    text = transformers_tokenizer(tmp_path / "exported").decode([1, 2, 3])
    assert text == CHARS[1:4]
    card = (tmp_path / "exported" / "README.md").read_text()
    best = (trained / "checkpoints" / "best").read_text().strip()
    assert f"{best} of run_" in card and "| began with | random weights |" in card
    assert "| validation loss | " in card and "| data | tokens |" in card and str(tmp_path) not in card


def test_that_of_the_first_weights_is_copied_byte_for_byte(run, tmp_path, capsys):
    folder = save("qwen3", tmp_path / "model")
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    assert run(config, f"--init_weights=hf:{folder}") == 0
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    assert f"tokenizer: copied from hf:{folder}" in capsys.readouterr().out
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "exported" / name).read_bytes() == (folder / name).read_bytes()


def test_another_tokenizer_of_the_dataset_is_the_one_that_is_exported(run, tmp_path, capsys):
    folder = save("qwen3", tmp_path / "model")
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    other = tmp_path / "other"
    other.mkdir()
    write_tokenizer(other, CharTokenizer(CHARS[::-1]), None)
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    data = tmp_path / "data"
    meta = json.loads((data / "meta.json").read_text())
    meta["tokenizer"] = keep_tokenizer(data, open_tokenizer(str(other)))
    (data / "meta.json").write_text(json.dumps(meta))
    assert run(config, f"--init_weights=hf:{folder}") == 0
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    assert "tokenizer: that of the dataset" in capsys.readouterr().out
    assert open_tokenizer(str(tmp_path / "exported")).decode([0]) == CHARS[-1]


def test_a_dataset_that_has_moved_can_be_named(trained, tmp_path, capsys):
    shutil.move(tmp_path / "tokens", tmp_path / "moved")
    export_hf.main([str(trained), str(tmp_path / "without")])
    assert "tokenizer: none was found" in capsys.readouterr().out
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    export_hf.main([str(trained), str(tmp_path / "with"), f"--dataset={tmp_path / 'moved'}"])
    assert (tmp_path / "with" / "tokenizer.json").exists()


# --- sample.py ---


def sampled(capsys, *flags) -> str:
    sample.main([*flags, "--prompt=AB", "--max_new_tokens=20", "--device=cpu"])
    return capsys.readouterr().out.partition("--- sample 1 ---")[2]


def test_an_export_gives_the_samples_of_its_checkpoint(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    capsys.readouterr()
    expected = sampled(capsys, f"--out_dir={trained}")
    assert sampled(capsys, f"--hf={tmp_path / 'exported'}") == expected != ""
    assert sampled(capsys, f"--hf=hf:{tmp_path / 'exported'}") == expected


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    write_tokenizer(tmp_path / "exported", CharTokenizer(CHARS + "é"), None)
    with pytest.raises(UserError, match="has 65 ids, the model 64; one of them is from another model"):
        sampled(capsys, f"--hf={tmp_path / 'exported'}")


def test_a_character_that_the_tokenizer_lacks_is_one_message(trained, tmp_path):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    with pytest.raises(UserError, match="cannot encode this text"):
        sample.main([f"--hf={tmp_path / 'exported'}", "--prompt=A B", "--device=cpu"])


@pytest.mark.parametrize("flags", [[], ["--out_dir=a", "--hf=b"]])
def test_a_checkpoint_or_weights_must_be_named_but_not_both(flags, capsys):
    with pytest.raises(SystemExit):
        sample.main(flags)
    assert "--hf" in capsys.readouterr().err


# --- what is imported ---


def test_training_imports_neither_transformers_nor_the_hub():
    found = "sorted({'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules))"
    code = f"import sys, train, sample, tools.export_hf; print({found})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
