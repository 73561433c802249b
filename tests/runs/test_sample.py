"""sample.py as a user runs it: on the checkpoint of a tiny run."""

import dataclasses
import json
import re
import shutil
import sys

import pytest
import torch
from support import warm_python
from support.helpers import HANG_S, ROOT, TINY

import sample
from common.errors import UserError
from data.tokenizers.char_tokenizer import CharTokenizer
from generation import source


@pytest.fixture(scope="module")
def kept():
    return []


@pytest.fixture
def ready(kept, request):
    """The out_dir of `trained`, one for all tests that leave it as it is."""
    if not kept:
        kept.append(request.getfixturevalue("trained"))
    return kept[0]


def text(capsys, out_dir, *flags) -> str:
    sample.main([f"--out_dir={out_dir}", "--prompt=AB", "--max_new_tokens=40", "--device=cpu", *flags])
    return capsys.readouterr().out


def test_a_seed_gives_one_text_and_another_seed_another(ready, capsys):
    first, again, other = (text(capsys, ready, f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again != other
    assert "--- sample 1 ---\nAB" in first
    assert len(first.split("--- sample 1 ---\n")[1].rstrip("\n")) == TINY["block_size"]


def test_temperature_0_and_top_k_1_both_take_the_most_likely_token(ready, capsys):
    assert text(capsys, ready, "--temperature=0") == text(capsys, ready, "--top_k=1", "--seed=5")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_computes_in_eval_mode_in_the_dtype_that_is_asked_for(dtype, ready, capsys, monkeypatch):
    def generate(model, *_, **__):
        assert not any(module.training for module in model.modules())
        computed.append(model.embed(torch.tensor([[1]])).dtype)
        return [[]]

    computed = []
    monkeypatch.setattr(sample, "generate", generate)
    text(capsys, ready, f"--dtype={dtype}")
    assert computed == [getattr(torch, dtype)]


def test_the_best_checkpoint_can_be_chosen(ready, capsys):
    assert "step-00000004" in text(capsys, ready)
    best = (ready / "checkpoints" / "best").read_text().strip()
    about = text(capsys, ready, "--checkpoint=best").splitlines()[0]
    assert re.fullmatch(rf"checkpoint .*{best}, iteration \d+, validation loss \d\.\d{{4}}", about)
    with pytest.raises(UserError, match="there are latest, best, step-"):
        text(capsys, ready, "--checkpoint=step-7")


@pytest.mark.parametrize(
    "flag",
    ["--top_k=-1", "--temperature=nan", "--num_samples=0", "--top_p=0", "--device=tpu", "--batch_size=1025"],
)
def test_bad_options_are_named_without_a_traceback(capsys, flag):
    with pytest.raises(SystemExit) as stop:
        text(capsys, "out", flag)
    assert stop.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


def test_no_checkpoint_is_one_line_and_status_1(tmp_path):
    command = [sys.executable, "sample.py", f"--out_dir={tmp_path}"]
    done = warm_python.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "holds no complete checkpoint" in done.stderr


# --- several prompts ---


def split(shown: str) -> dict[str, str]:
    """{title: text}"""
    _, *parts = shown.split("\n--- ")
    return {title: body.rstrip("\n") for title, _, body in (part.partition(" ---\n") for part in parts)}


def test_each_prompt_has_its_samples_whatever_the_size_of_a_batch(ready, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfCDE\r\n\n9\n")
    flags = (f"--prompts={file}", "--prompt=FGHI", "--num_samples=2")
    shown = split(text(capsys, ready, *flags))
    titles = [f"prompt {prompt}, sample {number}" for prompt in (1, 2, 3, 4) for number in (1, 2)]
    assert list(shown) == titles
    begins = ["AB", "AB", "FGHI", "FGHI", "CDE", "CDE", "9", "9"]
    assert [body.startswith(prompt) for body, prompt in zip(shown.values(), begins, strict=True)] == [
        True
    ] * 8
    assert len(set(shown.values())) == 8
    for size in (1, 3):
        assert split(text(capsys, ready, *flags, f"--batch_size={size}")) == shown


def test_the_space_in_front_of_a_new_word_stays(ready, capsys, monkeypatch):
    monkeypatch.setattr(
        CharTokenizer, "decode", lambda _, ids: "".join(f" word{one}" for one in ids).removeprefix(" ")
    )
    assert "\nword17 word18 word" in text(capsys, ready, "--max_new_tokens=2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\n \n", "holds no prompt"),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
        (b"a\x1b[2J", "a prompt has a control character"),
    ],
)
def test_a_file_without_prompts_is_one_message(content, message, tmp_path):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        sample.main([f"--out_dir={tmp_path}", f"--prompts={file}", "--device=cpu"])


# --- where a text ends ---


def test_a_text_ends_at_the_context_and_lines_say_so_and_how_fast_it_was(ready, capsys):
    context = TINY["block_size"]
    sample.main([f"--out_dir={ready}", "--prompt=ABC", "--max_new_tokens=999", "--device=cpu"])
    shown = capsys.readouterr()
    assert len(shown.out.partition("--- sample 1 ---\n")[2].rstrip("\n")) == context
    assert f"the model's context has {context} tokens, which leave room for {context - 3} new" in shown.err
    last = shown.err.splitlines()[-1]
    assert re.fullmatch(rf"{context - 3} new tokens in [\d.]+ s, [\d,]+ tokens/s", last)


def other_tokens(ready, folder, **keys):
    """A copy of the run's dataset, whose meta.json says something else."""
    shutil.copytree(ready.parent / "tokens", folder)
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def test_text_ends_at_the_end_of_text_of_the_dataset_unless_told_otherwise(
    ready, tmp_path, capsys, monkeypatch
):
    def greedy(*flags) -> str:
        shown = text(capsys, ready, "--temperature=0", *flags)
        return shown.partition("--- sample 1 ---\nAB")[2].rstrip("\n")

    def load_model(*arguments):
        folder, saved, model = load(*arguments)
        return folder, dataclasses.replace(saved, data=saved.data | {"eot_id": ord(whole[10]) - 48}), model

    whole, load = greedy(), source.load_model
    # the dataset that the model was trained on: another end-of-text id of a dataset named later has no say
    tokens = other_tokens(ready, tmp_path / "tokens", eot_id=ord(whole[5]) - 48)
    assert greedy(f"--dataset={tokens}") == whole
    monkeypatch.setattr(source, "load_model", load_model)
    assert greedy() == whole.partition(whole[10])[0]
    assert greedy("--ignore_eot") == whole


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"kind": "tiktoken", "name": "gpt2"},
        {"kind": "char", "name": "char", "chars": "".join(map(chr, range(49, 49 + 64)))},
    ],
    ids=["another kind", "other characters"],
)
def test_a_dataset_with_another_tokenizer_than_the_run_is_refused(tokenizer, ready, tmp_path):
    tokens = other_tokens(ready, tmp_path / "tokens", tokenizer=tokenizer)
    found = (
        f"tokens has the tokenizer {tokenizer['name']} .*, and .*step-00000004 has char .*: the same ids "
        "would be other text; name the run's with --dataset"
    )
    with pytest.raises(UserError, match=found):
        sample.main([f"--out_dir={ready}", f"--dataset={tokens}", "--prompt=A", "--device=cpu"])


def test_a_dataset_has_no_chat_template(ready):
    with pytest.raises(UserError, match="^--chat: transformers cannot use a chat template of .*tokens"):
        sample.main([f"--out_dir={ready}", "--prompt=A", "--chat", "--device=cpu"])
