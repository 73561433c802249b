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
from support.preparation import SHARED_DATA, shared

import sample
from common.errors import UserError
from data.pipeline.meta_file import keep_tokenizer
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.model_file import added_token
from data.tokenizers.to_file import write_tokenizer
from data.tokenizers.tokenizer import open_tokenizer
from tools import export_hf
from tools.evaluate import __main__ as evaluate

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


def give_tokenizer(data, tokenizer, folder) -> None:
    """The dataset has this tokenizer; `folder`: a new one for its files."""
    folder.mkdir()
    write_tokenizer(folder, tokenizer, None)
    meta = json.loads((data / "meta.json").read_text())
    meta["tokenizer"] = keep_tokenizer(data, open_tokenizer(str(folder)))
    (data / "meta.json").write_text(json.dumps(meta))


def test_weights_do_not_begin_a_run_on_tokens_of_another_tokenizer(run, tmp_path, capsys):
    folder = save("qwen3", tmp_path / "model")
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    give_tokenizer(tmp_path / "data", CharTokenizer(CHARS[::-1]), tmp_path / "other")
    capsys.readouterr()
    assert run(config, f"--init_weights=hf:{folder}") == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'data'} has the tokenizer other (" in error
    assert f"and hf:{folder} has model (" in error
    assert f"would be other text; prepare the dataset with --tokenizer={folder}" in error
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_one_tokenizer_in_two_forms_is_no_other_and_the_files_beside_the_weights_are_exported(
    run, tmp_path, capsys
):
    folder = save("qwen3", tmp_path / "model")
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1)
    data = tmp_path / "data"
    meta = json.loads((data / "meta.json").read_text())
    meta["tokenizer"] = {"kind": "char", "name": "char", "chars": CHARS}
    (data / "meta.json").write_text(json.dumps(meta | {"eot_id": None}))
    assert run(config, f"--init_weights=hf:{folder}") == 0
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "exported")])
    assert f"tokenizer: copied from hf:{folder}" in capsys.readouterr().out
    shutil.rmtree(folder)  # the weights are gone
    export_hf.main([str(tmp_path / "out"), str(tmp_path / "again")])
    assert "tokenizer: that of the dataset" in capsys.readouterr().out


def test_a_tokenizer_that_cannot_be_compared_is_said_and_stops_nothing(run, tmp_path, caplog):
    folder = save("qwen3", tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    assert run(hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1), f"--init_weights=hf:{folder}") == 0
    assert "have one tokenizer is not known: " in caplog.text


def prepared_anew(trained, tmp_path) -> list[str]:
    path = tmp_path / "tokens" / "meta.json"
    meta = json.loads(path.read_text())
    meta["tokenizer"]["chars"] = CHARS[::-1]
    path.write_text(json.dumps(meta))
    return []


def another_named(trained, tmp_path) -> list[str]:
    other = shutil.copytree(tmp_path / "tokens", tmp_path / "others")
    give_tokenizer(other, CharTokenizer(CHARS[::-1]), tmp_path / "names")
    return [f"--dataset={other}"]


@pytest.mark.parametrize("change", [prepared_anew, another_named])
def test_no_command_takes_another_tokenizer_than_the_checkpoints(change, trained, tmp_path):
    flags = change(trained, tmp_path)
    message = "has the tokenizer .*, and .*step-00000004 has char .*: the same ids would be other text; name "
    with pytest.raises(UserError, match=message):
        export_hf.main([str(trained), str(tmp_path / "exported"), *flags])
    assert not list(tmp_path.glob("exported*"))
    with pytest.raises(UserError, match=message):
        sample.main([f"--out_dir={trained}", "--prompt=AB", "--device=cpu", *flags])
    if not flags:
        with pytest.raises(UserError, match=message):
            evaluate.main([str(trained), f"--dataset={tmp_path / 'tokens'}", "--device=cpu"])


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


def test_an_added_token_without_a_row_is_no_fault_until_a_text_has_it(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    capsys.readouterr()
    expected = sampled(capsys, f"--hf={tmp_path / 'exported'}")
    padded(tmp_path / "exported")
    assert open_tokenizer(str(tmp_path / "exported")).vocab_size == VOCAB + 1
    assert sampled(capsys, f"--hf={tmp_path / 'exported'}") == expected != ""
    with pytest.raises(UserError, match="the prompt has the id 64, but the model has only the ids below 64"):
        sample.main([f"--hf={tmp_path / 'exported'}", "--prompt=A<pad>", "--device=cpu"])
    for text, right in (("ABC", True), ("A<pad>", False)):
        (tmp_path / "a.txt").write_text(text)
        argv = [f"--hf={tmp_path / 'exported'}", f"--text={tmp_path / 'a.txt'}", f"--output={tmp_path}"]
        if right:
            assert evaluate.main([*argv, "--device=cpu"]) == 0
        else:
            with pytest.raises(UserError, match="a text has the id 64, but the model has only the ids below"):
                evaluate.main([*argv, "--device=cpu"])


def test_tokens_of_a_tokenizer_with_a_padding_token_are_trained_on_if_none_is_one(run, tmp_path, capsys):
    folder = save("qwen3", tmp_path / "model")
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    padded(folder)
    config, data = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1), tmp_path / "data"
    meta = json.loads((data / "meta.json").read_text()) | {"vocab_size": VOCAB + 1}
    for largest, status in ((VOCAB - 1, 0), (VOCAB, 2)):
        for file in meta["files"].values():
            file["max_id"] = largest
        (data / "meta.json").write_text(json.dumps(meta))
        assert run(config, f"--init_weights=hf:{folder}") == status, capsys.readouterr()
    assert "contains token id 64, beyond the model's vocab_size=64" in capsys.readouterr().err


# --- where an export stops ---

ENDS = {"eos_token_id": [7, 9], "pad_token_id": 3, "temperature": 0.6, "top_k": 20, "do_sample": True}


def test_an_export_stops_where_the_checkpoint_stops_and_has_what_stood_beside_the_weights(
    run, tmp_path, capsys
):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the reference")
    folder = save("qwen3", tmp_path / "model")
    write_tokenizer(folder, CharTokenizer(CHARS), None)
    (folder / "generation_config.json").write_text(json.dumps(ENDS))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: {{ messages }}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": CHARS[3]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = hf_run(tmp_path, out_dir=tmp_path / "out", max_iters=1, learning_rate=0.0, min_lr=0.0)
    data = tmp_path / "data"
    meta = json.loads((data / "meta.json").read_text())
    meta["tokenizer"] = {"kind": "char", "name": "char", "chars": CHARS}
    (data / "meta.json").write_text(json.dumps(meta | {"eot_id": 11}))
    assert run(config, f"--init_weights=hf:{folder}") == 0
    out, exported = tmp_path / "out", tmp_path / "exported"
    export_hf.main([str(out), str(exported)])
    written = json.loads((exported / "generation_config.json").read_text())
    assert written == ENDS | {"bos_token_id": 1, "eos_token_id": [7, 9, 11]}
    template = "additional_chat_templates/tool_use.jinja"
    assert (exported / template).read_bytes() == (folder / template).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer.pad_token_id == 3 and set(tokenizer.chat_template) == {"default", "tool_use"}

    shutil.rmtree(folder)  # what was beside the weights is in the checkpoint, too
    export_hf.main([str(out), str(tmp_path / "again")])
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == written

    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    expected, ended, greedy = [], set(), {"do_sample": False, "max_new_tokens": 20}
    greedy |= {"temperature": None, "top_k": None}
    for first in range(0, VOCAB, 3):
        ids = torch.tensor([[first]])
        (made,) = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **greedy).tolist()
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


def test_an_export_gives_the_samples_of_its_checkpoint(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    capsys.readouterr()
    expected = sampled(capsys, f"--out_dir={trained}")
    assert sampled(capsys, f"--hf={tmp_path / 'exported'}") == expected != ""
    assert sampled(capsys, f"--hf=hf:{tmp_path / 'exported'}") == expected


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(trained, tmp_path, capsys):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    write_tokenizer(tmp_path / "exported", CharTokenizer(CHARS + "é"), None)
    with pytest.raises(UserError, match="has 65 ids, the model in .* 64; one of them is from another model"):
        sampled(capsys, f"--hf={tmp_path / 'exported'}")


# --- what is imported ---


def test_training_imports_neither_transformers_nor_the_hub():
    found = "sorted({'transformers', 'huggingface_hub', 'safetensors'} & set(sys.modules))"
    code = f"import sys, train, sample, tools.export_hf; print({found})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
