"""An exported folder has the tokenizer that made the tokens, and sample.py reads it."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from support.helpers import ROOT
from support.hf_models import VOCAB, hf_run, save
from support.preparation import SHARED_DATA, shared, small_bpe
from support.sentencepiece_files import READ, write_model

import sample
from common.errors import UserError
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.json_file import added_token
from data.tokenizers.to_file import write_tokenizer
from data.tokenizers.tokenizer import keep_tokenizer, open_tokenizer
from tools import evaluate, export_hf
from training.pretrained.tokenizer_hash import another_tokenizer

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


LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("cl100k_base", "o200k_base")]


@pytest.mark.parametrize("name", ["gpt2", *LARGE])
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


@pytest.fixture
def model(tmp_path):
    """The folder of tiny weights with a tokenizer of characters."""
    folder = save("qwen3", tmp_path / "model")
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    return folder


def change_meta(data, **fields) -> None:
    path = data / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def give_tokenizer(data, tokenizer, folder) -> None:
    """The dataset has this tokenizer; `folder`: a new one for its files."""
    folder.mkdir()
    write_tokenizer(folder, tokenizer, None)
    change_meta(data, tokenizer=keep_tokenizer(data, open_tokenizer(str(folder))))


def test_weights_do_not_begin_a_run_on_tokens_of_another_tokenizer(model, run, tmp_path, capsys):
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    give_tokenizer(tmp_path / "data", CharTokenizer(CHARS[::-1]), tmp_path / "other")
    capsys.readouterr()
    assert run(config, f"--init_weights=hf:{model}") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'data'} has the tokenizer other (" in error
    assert f"and hf:{model} has another: the same ids " in error
    assert f"would be other text; prepare the dataset with --tokenizer={model}" in error
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_tokenizer_that_cannot_be_compared_is_said_and_stops_nothing(model, run, tmp_path, caplog):
    (model / "tokenizer.json").write_text("{}")
    assert run(hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1), f"--init_weights=hf:{model}") == 0
    assert "have one tokenizer is not known: " in caplog.text


def compare(tmp_path, recorded) -> bool | None:
    meta = {"dtype": "uint32", "vocab_size": 60_000, "tokenizer": recorded}
    (tmp_path / "dataset" / "meta.json").write_text(json.dumps(meta))
    return another_tokenizer(tmp_path / "weights", tmp_path / "dataset")


def older_form(content) -> None:
    """As earlier versions of the tokenizers library wrote it."""
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    del content["model"]["ignore_merges"], content["truncation"]


@pytest.mark.parametrize(
    "change, another",
    [
        (lambda content: None, False),
        (older_form, False),
        (lambda content: content.update(normalizer={"type": "NFC"}), None),
        (lambda content: content["model"]["vocab"].update(a=65, b=64), True),
    ],
)
def test_hashes_tell_whether_two_files_are_one_tokenizer(tmp_path, change, another):
    (tmp_path / "dataset").mkdir()
    path = small_bpe(tmp_path / "weights")
    content = json.loads(path.read_text())
    content["model"] |= {"vocab": content["model"]["vocab"] | {"ab": 256}, "merges": [["a", "b"]]}
    path.write_text(json.dumps(content))
    recorded = keep_tokenizer(tmp_path / "dataset", open_tokenizer(str(path)))
    change(content)
    path.write_text(json.dumps(content))
    assert compare(tmp_path, recorded) is another


def test_gpt2_and_characters_are_known_in_a_tokenizer_json_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))
    for name in ("weights", "dataset"):
        (tmp_path / name).mkdir()
    gpt2, chars = open_tokenizer("gpt2"), CharTokenizer("ab")
    for tokenizer in (gpt2, chars):
        write_tokenizer(tmp_path / "weights", tokenizer, None)
        for recorded in (keep_tokenizer(tmp_path / "dataset", gpt2), "gpt2"):
            assert compare(tmp_path, recorded) is (tokenizer is chars)
        assert compare(tmp_path, chars.meta) is (tokenizer is gpt2)


def test_a_tokenizer_model_is_known_by_its_file(tmp_path):
    (tmp_path / "dataset").mkdir()
    write_model(tmp_path / "weights")
    tokenizer = open_tokenizer(str(tmp_path / "weights"))
    recorded = keep_tokenizer(tmp_path / "dataset", tokenizer)
    assert compare(tmp_path, recorded) is False
    write_model(tmp_path / "weights", *READ["neither"])
    assert compare(tmp_path, recorded) is True
    (tmp_path / "weights" / "tokenizer.model").unlink()
    write_tokenizer(tmp_path / "weights", open_tokenizer(str(tmp_path / "dataset")), None)
    assert compare(tmp_path, recorded) is False  # the same hash
    assert compare(tmp_path, recorded | {"sha256": "0" * 64}) is None
    small_bpe(tmp_path / "weights")
    assert compare(tmp_path, recorded) is None  # a tokenizer.model and a tokenizer.json: not compared


def test_no_export_takes_another_tokenizer_than_the_checkpoints(trained, tmp_path):
    """Neither if the dataset was prepared anew nor if another one is named."""
    tokens, other = tmp_path / "tokens", shutil.copytree(tmp_path / "tokens", tmp_path / "others")
    give_tokenizer(other, CharTokenizer(CHARS[::-1]), tmp_path / "names")
    change_meta(tokens, tokenizer={"kind": "char", "name": "char", "chars": CHARS[::-1]})
    message = "has the tokenizer .*, and .*step-00000004 has char .*: the same ids would be other text; name "
    for flags in ([], [f"--dataset={other}"]):
        with pytest.raises(UserError, match=message):
            export_hf.main([str(trained), str(tmp_path / "exported"), *flags])
    assert not list(tmp_path.glob("exported*"))


def test_a_dataset_that_has_moved_can_be_named(trained, tmp_path, capsys):
    shutil.move(tmp_path / "tokens", tmp_path / "moved")
    export_hf.main([str(trained), str(tmp_path / "without")])
    assert "tokenizer: none was found" in capsys.readouterr().out
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    export_hf.main([str(trained), str(tmp_path / "with"), f"--dataset={tmp_path / 'moved'}"])
    assert (tmp_path / "with" / "tokenizer.json").exists()


# --- more ids than the model has rows ---


def padded(folder):
    """Its tokenizer gets a padding token that has no row in the embedding, as LLaMA 2's did."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [added_token(VOCAB, "<pad>") | {"special": False}]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def test_an_export_samples_as_its_checkpoint_also_with_a_token_without_a_row(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    capsys.readouterr()
    expected = sampled(capsys, f"--out_dir={trained}")
    assert sampled(capsys, f"--hf={tmp_path / 'exported'}") == expected != ""
    padded(tmp_path / "exported")
    assert open_tokenizer(str(tmp_path / "exported")).vocab_size == VOCAB + 1
    assert sampled(capsys, f"--hf=hf:{tmp_path / 'exported'}") == expected
    with pytest.raises(UserError, match="the prompt has the id 64, but the model has only the ids below 64"):
        sample.main([f"--hf={tmp_path / 'exported'}", "--prompt=A<pad>", "--device=cpu"])
    text = tmp_path / "a.txt"
    argv = [f"--hf={tmp_path / 'exported'}", f"--text={text}", f"--output={tmp_path}", "--device=cpu"]
    text.write_text("ABC")
    evaluate.main(argv)
    text.write_text("A<pad>")
    with pytest.raises(UserError, match="has the id 64, and the model's embedding has no such row"):
        evaluate.main(argv)


def test_tokens_are_trained_on_if_none_is_one_without_a_row(model, run, tmp_path, capsys):
    padded(model)
    config, data = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1), tmp_path / "data"
    files = json.loads((data / "meta.json").read_text())["files"]
    for largest, status in ((VOCAB - 1, 0), (VOCAB, 2)):
        files = {name: file | {"max_id": largest} for name, file in files.items()}
        change_meta(data, vocab_size=VOCAB + 1, files=files)
        assert run(config, f"--init_weights=hf:{model}") == status, capsys.readouterr()
    assert "contains token id 64, beyond the model's vocab_size=64" in capsys.readouterr().err


# --- where an export stops ---

ENDS = {"eos_token_id": [7, 9], "pad_token_id": 3, "temperature": 0.6, "top_k": 20, "do_sample": True}


def test_an_export_stops_where_the_checkpoint_stops(model, run, tmp_path, capsys):
    """And has what stood beside the weights, also if the dataset has the same tokenizer in another form."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {"pad_token": CHARS[3]}
    template = "additional_chat_templates/tool_use.jinja"
    (model / template).parent.mkdir()
    beside = {
        "generation_config.json": json.dumps(ENDS),
        template: "tools: {{ messages }}",
        "chat_template.jinja": "{{ messages }}",
        "tokenizer_config.json": json.dumps(settings),
    }
    for name, text in beside.items():
        (model / name).write_text(text)
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1, learning_rate=0.0, min_lr=0.0)
    tokenizer = {"kind": "char", "name": "char", "chars": CHARS}
    change_meta(tmp_path / "data", tokenizer=tokenizer, eot_id=11)
    assert run(config, f"--init_weights=hf:{model}") == 0
    out, exported = tmp_path / "out", tmp_path / "exported"
    export_hf.main([str(out), str(exported)])
    assert f"tokenizer: copied from hf:{model}" in capsys.readouterr().out
    written = json.loads((exported / "generation_config.json").read_text())
    assert written == ENDS | {"bos_token_id": 1, "eos_token_id": [7, 9, 11]}
    for name in ("tokenizer.json", *list(beside)[1:]):
        assert (exported / name).read_bytes() == (model / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.pad_token_id == 3 and set(tokenizer.chat_template) == {"default", "tool_use"}

    shutil.rmtree(model)  # the weights are gone; their generation settings are in the checkpoint, too
    export_hf.main([str(out), str(tmp_path / "again")])
    assert "tokenizer: that of the dataset" in capsys.readouterr().out
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == written

    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    expected, ended, greedy = [], set(), {"do_sample": False, "max_new_tokens": 20}
    greedy |= {"temperature": None, "top_k": None}
    for first in range(0, VOCAB, 3):
        ids = torch.tensor([[first]])
        (made,) = theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **greedy).tolist()
        ended.add(made[-1] if len(made) < 21 else None)
        expected.append(tokenizer.decode([first, *(one for one in made[1:] if one not in (7, 9, 11))]))
    assert len(ended) >= 3, ended  # at least two of the three ends were met, and some texts met none
    prompts = [f"--prompt={CHARS[first]}" for first in range(0, VOCAB, 3)]
    for source in (f"--out_dir={out}", f"--hf={exported}"):
        capsys.readouterr()
        sample.main([source, *prompts, "--temperature=0", "--max_new_tokens=20", "--device=cpu"])
        assert re.findall(r" ---\n(.*)\n", capsys.readouterr().out) == expected


# --- sample.py ---


def sampled(capsys, *flags) -> str:
    sample.main([*flags, "--prompt=AB", "--max_new_tokens=20", "--device=cpu"])
    return capsys.readouterr().out.partition("--- sample 1 ---")[2]


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    write_tokenizer(tmp_path / "exported", CharTokenizer(CHARS + "é"), None)
    with pytest.raises(UserError, match="has 65 ids, the model in .* 64; one of them is from another model"):
        sampled(capsys, f"--hf={tmp_path / 'exported'}")


# --- what is imported ---


def test_training_imports_no_tokenizer_and_neither_transformers_nor_the_hub():
    code = "import sys, train; print('data.tokenizers.tokenizer' in sys.modules)"
    libraries = "'transformers', 'huggingface_hub', 'tokenizers', 'sentencepiece', 'fastokens'"
    code += f"; import sample, tools.export_hf; print(sorted({{{libraries}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n[]\n", done.stderr
