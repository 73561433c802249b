"""python -m tools.evaluate on held-out text: what is counted, that transformers finds the same, and that each
mistake in its arguments is one line."""

import dataclasses
import hashlib
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.evaluation import CHARS, EOT, EOT_ID, TEXTS, figures, make_token_files, make_weights, write_texts
from support.helpers import TINY, run_train, write_config
from support.hf_models import VOCAB, load_reference

from common.errors import UserError
from data.tokenizers.char_tokenizer import CharTokenizer
from data.tokenizers.to_file import write_tokenizer
from data.tokenizers.tokenizer import open_tokenizer
from generation import source
from tools import evaluate, export_hf
from tools.evaluate import windows
from training.pretrained.same_tokenizer import tokenizer_hash

CONTEXT = 64  # positions of the model
TOKENS, BYTES = sum(map(len, TEXTS)), sum(len(text.encode()) for text in TEXTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    make_weights(folder / "weights")
    write_texts(folder / "texts.jsonl", TEXTS)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    """The figures of the texts."""
    return figures(f"--hf={folder / 'weights'}", f"--text={folder / 'texts.jsonl'}", output=folder / "plain")


@pytest.fixture(scope="module")
def run_on_texts(folder):
    """The out_dir of a run on the texts; its dataset is beside it."""
    data, out = make_token_files(folder / "data", folder / "weights", TEXTS), folder / "out"
    keys = {**TINY, "dataset": str(data), "out_dir": str(out), "max_iters": 2}
    done = run_train(write_config(folder / "run.py", **keys))
    assert done.returncode == 0, done.stderr
    return out


@torch.no_grad()
def nats_of_transformers(weights, texts) -> float:
    """Each token is predicted from as many tokens before it as the model can see."""
    model = load_reference(weights)
    total = 0.0
    for text in texts:
        ids = torch.tensor([EOT_ID, *map(CHARS.index, text)])
        first = model(input_ids=ids[None, :CONTEXT]).logits[0]
        later = [
            model(input_ids=ids[None, end - CONTEXT : end]).logits[0, -1:]
            for end in range(CONTEXT + 1, len(ids))
        ]
        logits = torch.cat([first, *later])[: len(ids) - 1]
        total += torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").item()
    return total


def scale(weights, factor):
    path = weights / "model.safetensors"
    save_file({name: tensor * factor for name, tensor in load_file(path).items()}, path)
    return weights


# --- windows ---


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 17, 31])
@pytest.mark.parametrize("prefix_id", [None, 99])
def test_every_token_is_predicted_once_and_no_window_is_too_long(length, stride, prefix_id):
    ids = list(range(length))
    found = list(windows(ids, prefix_id, 8, stride))
    predicted = [int(token) for window, count in found for token in window[-count:]]
    assert predicted == (ids[1:] if prefix_id is None else ids)
    whole = ids if prefix_id is None else [prefix_id, *ids]
    for window, count in found:
        joined = window.tolist()
        end = whole.index(joined[-1]) + 1
        assert joined == whole[end - len(joined) : end] and len(joined) <= 8 + 1
        assert count <= (8 if joined[0] == whole[0] else stride)
        assert len(joined) == 8 + 1 or joined[0] == whole[0], "a window could see more"


# --- figures ---


@pytest.mark.parametrize(("stride", "texts"), [(1, [TEXTS[0], TEXTS[1][:100]]), (64, [TEXTS[0], TEXTS[2]])])
def test_figures_equal_those_of_transformers(stride, texts, folder, tmp_path):
    """With the longest contexts, and where a text fits into the context."""
    path = write_texts(tmp_path / "texts.jsonl", texts)
    argv = [f"--hf={folder / 'weights'}", f"--text={path}", f"--stride={stride}"]
    found, tokens = figures(*argv, output=tmp_path)["texts"][0], sum(map(len, texts))
    nats = nats_of_transformers(folder / "weights", texts)
    assert found["nats"] == pytest.approx(nats, rel=1e-5) and found["tokens"] == tokens
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-5)


def test_a_model_that_knows_nothing_needs_the_bits_of_its_vocabulary_for_each_token(folder, tmp_path):
    weights = scale(make_weights(tmp_path / "weights"), 0.0)
    found = figures(f"--hf={weights}", f"--text={folder / 'texts.jsonl'}", output=tmp_path)["texts"][0]
    assert found["perplexity"] == pytest.approx(VOCAB, rel=1e-6)
    assert (found["tokens"], found["bytes"], found["documents"]) == (TOKENS, BYTES, len(TEXTS))
    assert BYTES > TOKENS  # é has two bytes
    assert found["bits_per_byte"] == pytest.approx(math.log2(VOCAB) * TOKENS / BYTES, rel=1e-6)


def test_a_second_evaluation_finds_the_same_and_batches_change_nothing(folder, plain, tmp_path):
    argv = [f"--hf={folder / 'weights'}", f"--text={folder / 'texts.jsonl'}"]
    assert figures(*argv, output=folder / "plain")["texts"] == plain["texts"]
    for batch_size in (1, 3):
        found = figures(*argv, f"--batch_size={batch_size}", output=tmp_path)
        assert found["texts"][0]["nats"] == pytest.approx(plain["texts"][0]["nats"], rel=1e-6)


def test_a_text_file_is_one_document(folder, tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS[1])
    jsonl = write_texts(tmp_path / "a.jsonl", [TEXTS[1]])
    both = [f"--text={tmp_path / 'a.txt'}", f"--text={jsonl}"]
    one, other = figures(f"--hf={folder / 'weights'}", *both, output=tmp_path)["texts"]
    assert {**one, "name": ""} == {**other, "name": ""}


def test_the_tokenizers_own_first_token_is_a_context_and_is_not_counted(folder, plain, tmp_path):
    weights = make_weights(tmp_path / "weights", begins=True)
    found = figures(f"--hf={weights}", f"--text={folder / 'texts.jsonl'}", output=tmp_path)
    assert found["tokenizer"]["prefix_id"] == EOT_ID
    assert found["texts"] == plain["texts"]


def test_without_an_end_of_text_token_the_first_token_is_not_counted(trained, tmp_path):
    path = write_texts(tmp_path / "texts.jsonl", ["ABCD", "E", "00"])
    data = tmp_path / "tokens"
    found, split = figures(trained, f"--text={path}", f"--dataset={data}", output=trained)["texts"]
    assert (found["documents"], found["tokens"], found["bytes"]) == (3, 4, 4)
    assert (split["documents"], split["tokens"], split["bytes"]) == (1, 3999, 3999)


def test_an_exported_tokenizer_is_known_as_the_one_of_the_dataset(trained, tmp_path):
    export_hf.main([str(trained), str(tmp_path / "exported")])
    data = f"--dataset={tmp_path / 'tokens'}"
    ours = figures(trained, data, output=trained)["texts"][0]
    exported = figures(f"--hf={tmp_path / 'exported'}", data, output=tmp_path)["texts"][0]
    assert exported["nats"] == pytest.approx(ours["nats"], rel=1e-6)


# --- runs of ours ---


def test_a_prepared_dataset_has_the_figures_of_its_text(folder, run_on_texts):
    data, text = folder / "data", f"--text={folder / 'texts.jsonl'}"
    found = figures(run_on_texts, text, f"--dataset={data}", output=run_on_texts)
    of_text, of_dataset = found["texts"]
    same = ("documents", "tokens", "bytes", "nats", "perplexity", "bits_per_byte")
    assert [of_text[name] for name in same] == [of_dataset[name] for name in same]
    assert (of_text["tokens"], of_text["bytes"]) == (TOKENS, BYTES)
    assert found["model"]["iteration"] == 2 and "step-00000002" in found["model"]["checkpoint"]


@torch.no_grad()
def test_of_a_conversation_the_targets_alone_are_scored(folder, tmp_path):
    """Its first token has no other before it; the end-of-text token is a target, as its answer ends so."""
    data = make_token_files(tmp_path / "data", folder / "weights", ["Where? There.", "A", "Who? Me"])
    meta = json.loads((data / "meta.json").read_text()) | {"dtype": "int32"}
    for split in ("train", "val"):
        ids = np.fromfile(data / f"{split}.bin", "<u2").astype("<i4")
        questions = [0, 1, 2, 3, 4, 5, 14, 16, 17, 18, 19]  # of the validation split
        ids[questions] = ~ids[questions]
        ids.tofile(data / f"{split}.bin")
        meta["files"][f"{split}.bin"]["sha256"] = hashlib.sha256(ids.tobytes()).hexdigest()
    (data / "meta.json").write_text(json.dumps(meta))
    (found,) = figures(f"--hf={folder / 'weights'}", f"--dataset={data}", output=tmp_path)["texts"]
    model, nats, tokens = load_reference(folder / "weights"), 0.0, 0
    for conversation in np.split(ids, [14, 16]):
        plain = torch.tensor(np.where(conversation < 0, ~conversation, conversation), dtype=torch.int64)
        targets = torch.tensor(np.where(conversation < 0, -100, conversation), dtype=torch.int64)[1:]
        logits = model(input_ids=plain[None]).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
        tokens += int((targets >= 0).sum())
    assert (found["documents"], found["tokens"]) == (3, tokens)
    assert found["nats"] == pytest.approx(nats, rel=1e-5) and found["bytes"] == len(" There. Me" + 3 * EOT)


def test_what_ran_is_saved_beside_the_run_record(folder, run_on_texts, capsys):
    argv = [run_on_texts, f"--text={folder / 'texts.jsonl'}", "--dtype=bfloat16", "--limit=2"]
    found = figures(*argv, output=run_on_texts)
    assert list(run_on_texts.glob("run_*.json"))
    printed, texts = capsys.readouterr().out, found["texts"][0]
    assert "computed in bfloat16" in printed
    assert f"{texts['perplexity']:.4f}" in printed and f"{texts['bits_per_byte']:.4f}" in printed
    assert found["command"].startswith(f"python -m tools.evaluate {run_on_texts} --text=")
    assert found["precision"]["compute_dtype"] == "bfloat16"
    assert found["trained_in"] == {"dtype": "float32", "low_precision": "none"}
    assert found["tokenizer"]["sha256"] == tokenizer_hash(open_tokenizer(folder / "weights"))
    assert texts["documents"] == found["limit"] == 2
    assert found["versions"]["torch"] == torch.__version__


def test_a_run_in_low_precision_is_evaluated_without_and_says_so(folder, run_on_texts, capsys, monkeypatch):
    def load_model(*arguments):
        checkpoint, saved, model = load(*arguments)
        config = {**saved.config, "dtype": "bfloat16", "low_precision": "nvfp4"}
        return checkpoint, dataclasses.replace(saved, config=config), model

    load = source.load_model
    monkeypatch.setattr(source, "load_model", load_model)
    found = figures(run_on_texts, f"--text={folder / 'texts.jsonl'}", output=run_on_texts)
    assert found["precision"]["low_precision"] == "none"
    assert found["precision"]["compute_dtype"] == "bfloat16"
    assert found["trained_in"] == {"dtype": "bfloat16", "low_precision": "nvfp4"}
    assert "trained with low_precision=nvfp4, evaluated without" in capsys.readouterr().out


# --- mistakes ---


MISTAKES = {
    "nothing to evaluate": [],
    "absent.txt is no file": ["--text={}/absent.txt"],
    "few is no file; name a file that ends in": ["--text={}/few"],
    "empty.txt cannot be a folder": ["--text={}/texts.jsonl", "--output={}/empty.txt"],
    "config.json is a file of another kind": ["--text={}/weights/config.json"],
    "broken.jsonl, line 2 is not a JSON object": ["--text={}/broken.jsonl"],
    "has no text that could be predicted": ["--text={}/empty.txt"],
    "document 1: the tokenizer .* cannot encode": ["--text={}/foreign.txt"],
    "--stride=65 is more than the model's block_size=64": ["--text={}/texts.jsonl", "--stride=65"],
    "there is no folder .*/absent": ["--dataset={}/absent"],
    "other has the tokenizer few .*, and the model has weights .*: the same ids": ["--dataset={}/other"],
    "start it with python instead of torchrun": ["--text={}/texts.jsonl"],
    "--tasks needs lm-eval: pip install -r requirements/evaluate.txt": ["--tasks=arc_easy"],
}


@pytest.fixture(scope="module")
def mistakes(folder):
    (folder / "broken.jsonl").write_text('{"text": "A"}\n{"text"\n')
    (folder / "empty.txt").write_text("")
    (folder / "foreign.txt").write_text("Я")
    (folder / "few").mkdir()
    write_tokenizer(folder / "few", CharTokenizer("".join(map(chr, range(48, 112)))), None)
    make_token_files(folder / "other", folder / "few", ["ABC", "00"])
    return folder


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line(message, mistakes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    if "torchrun" in message:
        monkeypatch.setenv("WORLD_SIZE", "2")
    argv = [argument.format(mistakes) for argument in MISTAKES[message]]
    with pytest.raises(UserError, match=message) as raised:
        evaluate.main([f"--hf={mistakes / 'weights'}", f"--output={tmp_path}", *argv, "--device=cpu"])
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_is_one_line(folder, tmp_path):
    weights = scale(make_weights(tmp_path / "weights"), 1e3)
    argv = [f"--hf={weights}", f"--text={folder / 'texts.jsonl'}", "--dtype=float16", "--device=cpu"]
    with pytest.raises(UserError, match="the loss is not finite; .* --dtype=float32"):
        evaluate.main([*argv, f"--output={tmp_path / 'out'}"])


def test_a_damaged_validation_split_is_found(run_on_texts, folder, tmp_path):
    data = shutil.copytree(folder / "data", tmp_path / "data")
    tokens = np.fromfile(data / "val.bin", "<u2")
    tokens[3] ^= 1
    tokens.tofile(data / "val.bin")
    with pytest.raises(UserError, match=r"val\.bin is not the file that meta\.json describes"):
        evaluate.main([str(run_on_texts), f"--dataset={data}", "--device=cpu"])
