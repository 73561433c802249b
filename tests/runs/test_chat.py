"""From a file of conversations to a model that answers: data/chat/prepare.py, the loss over targets, and what
transformers says of both."""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.chat_templates import by_hand, chat_folder
from support.helpers import (
    TINY,
    checkpoint_tensors,
    last_run,
    run_in_one_launch,
    run_train,
    start_train,
    write_config,
)
from support.preparation import CHAR, run_parts_here, run_prepare

pytest.importorskip("transformers", reason="needs transformers, which renders the chat templates")

import transformers

import sample
from common.errors import UserError
from data.chat import prepare as chat_prepare
from data.inspect import __main__ as inspect
from data.pipeline.meta_file import read_meta
from tools import export_hf

COLOURS = ("red", "green", "blue", "white")
THINGS = (
    "sky sea grass snow rose leaf milk brick lake moss coal salt fern ruby ice wine frog cloud mint fire"
).split()
ASKED = (
    *("What colour is {}?", "Colour of {}?", "{}: which colour?", "Tell me the colour of {}.", "And {}?"),
    *("{}", "Is {} red or blue?", "How does {} look?", "Name the colour: {}", "Please, {}?"),
)
ANSWERS = {form.format(t): COLOURS[i % 4] for i, t in enumerate(THINGS) for form in ASKED}  # 200 questions
T = 64
ITERATIONS = 12


def record(question: str) -> dict:
    messages = [("user", question), ("assistant", ANSWERS[question])]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def write_records(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A Qwen3 of random weights, saved by transformers, with a tokenizer and a chat template."""
    folder = chat_folder(tmp_path_factory.mktemp("weights") / "tiny", "chatml")
    ends = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    config = transformers.Qwen3Config(
        **dict(vocab_size=448, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16),
        **dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128),
        **dict(tie_word_embeddings=True, bos_token_id=None, eos_token_id=ends),
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def prepare_here(monkeypatch, *arguments) -> None:
    """data/chat/prepare.py in this process."""
    monkeypatch.setattr("data.pipeline.preparation.run_parts", run_parts_here)
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
    chat_prepare.main()


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    """200 conversations, of which one in ten is for validation, as a dataset; and a run over it."""
    folder = tmp_path_factory.mktemp("chat")
    questions = random.Random(0).sample(sorted(ANSWERS), len(ANSWERS))
    write_records(folder / "chats.jsonl", [record(question) for question in questions])
    with pytest.MonkeyPatch.context() as patch:
        made = ["--input", folder / "chats.jsonl", "--tokenizer", weights, "--val_fraction", "0.1"]
        prepare_here(patch, *made, "--output", folder / "data")
    model = ("arch_preset", "n_layer", "n_head", "num_key_value_heads", "n_embd", "d_ff", "vocab_size")
    keys = {name: value for name, value in TINY.items() if name not in model}
    keys |= {"init_weights": f"hf:{weights}", "dataset": folder / "data", "block_size": T, "batch_size": 16}
    keys |= {"packing": "truncate", "doc_masking": True, "learning_rate": 4e-3, "min_lr": 4e-4}
    keys |= {"weight_decay": 0.0, "peak_tflops": 1.0, "max_iters": ITERATIONS}
    write_config(folder / "run.py", **keys)
    return folder


def stored(data: Path, split: str) -> list[list[int]]:
    """The documents of a split, with ~id for what is no target."""
    ids, lengths = (
        np.fromfile(data / f"{split}.bin", "<i4"),
        np.fromfile(data / f"{split}.bin.lengths", "<u4"),
    )
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def contents(data: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in data.iterdir() if re.search(r"bin|meta\.json", path.name)
    }


# --- the dataset ---


def test_the_files_hold_each_conversation_once_in_the_split_that_its_text_gives(folder, weights):
    marked = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n«{}<|im_end|>»\n"
    expected = [by_hand(weights, "chatml", marked.format(*pair)) for pair in ANSWERS.items()]
    train, val = (stored(folder / "data", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(expected) and 10 < len(val) < 30
    meta = read_meta(folder / "data")
    assert meta["dtype"] == "int32" and meta["chat"]["train_on"] == "assistant"
    assert meta["targets"] == sum(one >= 0 for ids in expected for one in ids)
    assert meta["eot_id"] == max(ids[-2] for ids in expected), "the end of a turn, a target"


def test_parquet_and_jsonl_and_any_number_of_workers_give_the_same(folder, weights, tmp_path, monkeypatch):
    """Of several parts. In a row of parquet a field that is not there is null."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    records = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    records[3]["messages"].insert(1, {"role": "assistant", "content": "", "tool_calls": [call]})
    records[3]["messages"].insert(2, {"role": "tool", "content": "blue"})
    records[5]["messages"][1]["train"] = True
    lines = write_records(tmp_path / "chats.jsonl", records)
    rows = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(records), rows, row_group_size=50)
    made = ["--tokenizer", weights, "--val_fraction", "0.1", "--input"]
    with monkeypatch.context() as patch:
        patch.setattr("data.pipeline.parts.PART_BYTES", 4000)
        for name, source in (("lines", lines), ("rows", rows)):
            prepare_here(patch, *made, source, "--output", tmp_path / name)
    done = run_prepare("chat", *made, lines, "--output", tmp_path / "two", "--workers", 2, part_bytes=4000)
    assert done.returncode == 0, done.stderr
    one, two = (contents(tmp_path / name) for name in ("lines", "two"))
    assert one == two and len(one) > 4
    assert sorted(split_documents(tmp_path / "rows")) == sorted(split_documents(tmp_path / "lines"))


def split_documents(data: Path) -> list[tuple[str, list[int]]]:
    """(split, document) of every token file."""
    found = []
    for path in sorted(data.glob("*.bin")):
        lengths = np.fromfile(f"{path}.lengths", "<u4")
        for part in np.split(np.fromfile(path, "<i4"), np.cumsum(lengths)[:-1]):
            found.append((path.name.partition("_")[0].removesuffix(".bin"), part.tolist()))
    return found


def test_max_tokens_leaves_out_whole_conversations_and_their_targets(folder, weights, monkeypatch, tmp_path):
    prepare_here(
        monkeypatch,
        *("--input", folder / "chats.jsonl", "--tokenizer", weights, "--val_fraction", "0.1"),
        *("--max_tokens", "2000", "--output", tmp_path / "data"),
    )
    made = [ids for split in ("train", "val") for ids in stored(tmp_path / "data", split)]
    whole = [ids for split in ("train", "val") for ids in stored(folder / "data", split)]
    assert 10 < len(made) < len(whole) and all(ids in whole for ids in made)
    assert read_meta(tmp_path / "data")["targets"] == sum(one >= 0 for ids in made for one in ids)


def test_the_same_command_again_does_nothing(folder, weights, monkeypatch, capsys):
    before = {path: path.stat().st_mtime_ns for path in (folder / "data").glob("*.bin*")}
    made = ["--input", folder / "chats.jsonl", "--tokenizer", weights, "--val_fraction", "0.1"]
    prepare_here(monkeypatch, *made, "--output", folder / "data")
    assert {path: path.stat().st_mtime_ns for path in (folder / "data").glob("*.bin*")} == before
    assert re.search(r"chat +1\d\.\d% of the tokens are targets; 0 cut, 0 too long", capsys.readouterr().out)
    with pytest.raises(UserError, match="train_on"):
        prepare_here(monkeypatch, *made, "--output", folder / "data", "--train_on", "last")


def test_bad_records_are_named_and_left_out_up_to_max_bad(weights, tmp_path, monkeypatch, capsys):
    records = [record(question) for question in list(ANSWERS)[:40]]
    image = {"role": "user", "content": [{"type": "image"}]}
    records[7] = {"messages": [image, {"role": "assistant", "content": "red"}]}
    path = write_records(tmp_path / "chats.jsonl", [*records, "no record"])
    path.write_text(path.read_text() + '{"messages": [{"role": "user", "content": "\\ud800"}]}\n{broken\n')
    made = ["--input", path, "--tokenizer", weights, "--output", tmp_path / "data", "--val_fraction", "0.2"]
    with pytest.raises(UserError, match="a part of kind 'image'"):
        prepare_here(monkeypatch, *made)
    prepare_here(monkeypatch, *made, "--max_bad", "4")
    assert "docs   39; 0 empty, 4 bad" in capsys.readouterr().out


def test_what_holds_no_conversations_is_refused(weights, tmp_path, monkeypatch):
    (tmp_path / "page.txt").write_text("a page")
    lines = write_records(tmp_path / "chats.jsonl", [record(question) for question in list(ANSWERS)[:3]])
    made = ["--tokenizer", weights, "--output", tmp_path / "data", "--input"]
    with pytest.raises(UserError, match="page.txt is one text and holds no conversations"):
        prepare_here(monkeypatch, *made, tmp_path)
    monkeypatch.setattr(chat_prepare, "open_or_download_tokenizer", lambda name: CHAR)
    with pytest.raises(UserError, match="a chat needs a folder with tokenizer.json in it"):
        prepare_here(monkeypatch, *made, lines)


def test_inspection_prints_conversations_with_their_targets_marked(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["inspect", str(folder / "data"), "--samples", "5", "--hash"])
    inspect.main()
    shown = re.findall(
        r"--- \w+\.bin at [\d,]+ ---\n<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n"
        r"\[\[(\w+)<\|im_end\|>\]\]\n",
        capsys.readouterr().out,
    )
    assert len(shown) == 10 and all(ANSWERS[question] == answer for question, answer in shown)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    inspect.main()
    assert re.search("\x1b\\[32m\\w+<\\|im_end\\|>\x1b\\[0m\n", capsys.readouterr().out)


# --- training ---


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--packing=stream"], r"only some tokens are targets; set --packing=truncate --doc_masking=True"),
        (["--doc_masking=False"], r"only some tokens are targets; set --packing=truncate"),
        (["--block_size=16"], r"a conversation of (\d+) tokens, which block_size=16 would cut inside"),
    ],
)
def test_what_would_lose_the_targets_or_cut_a_conversation_is_refused(folder, run, capsys, flags, reason):
    assert run(folder / "run.py", f"--out_dir={folder / 'refused'}", *flags)
    assert re.search(reason, " ".join(capsys.readouterr().err.split()))


# name -> (processes, flags); 16 windows an iteration
DIVIDED = {
    "1 x 1 x 16": (1, []),
    "1 x 4 x 4": (1, ["--batch_size=4", "--gradient_accumulation_steps=4", "--eval_batch_size=1"]),
    **{
        f"{name}, 2 x 2 x 4": (2, ["--batch_size=4", "--gradient_accumulation_steps=2", *flags])
        for name, flags in {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}.items()
    },
}


@pytest.fixture(scope="module")
def runs(folder):
    """name -> run record"""
    for processes in (1, 2):
        commands = [
            [folder / "run.py", "--eval_interval=3", f"--out_dir={folder / name}", *flags]
            for name, (count, flags) in DIVIDED.items()
            if count == processes
        ]
        run_in_one_launch(folder, commands, processes)
    return {name: last_run(folder / name) for name in DIVIDED}


@pytest.mark.parametrize("name", list(DIVIDED)[1:])
def test_the_losses_are_equal_however_the_windows_are_divided(runs, name):
    found, expected = (
        [row[key] for row in runs[which]["training_iterations"] for key in ("loss", "target_percent")]
        for which in (name, "1 x 1 x 16")
    )
    assert len(found) == 2 * ITERATIONS and found == pytest.approx(expected, rel=5e-6)
    assert 10 < found[1] < 20


def mean_loss(weights: Path, documents: list[list[int]]) -> float:
    """transformers' loss of conversations, one by one, weighted by their targets."""
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    total = count = 0.0
    for ids in documents:
        labels = torch.tensor([[one if one >= 0 else -100 for one in ids]])
        targets = int((labels[:, 1:] >= 0).sum())
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([[max(one, ~one) for one in ids]]), labels=labels).loss
        total, count = total + targets * loss.item(), count + targets
    return total / count


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_the_loss_of_packed_conversations_is_that_of_transformers_one_by_one(
    folder, weights, tmp_path, monkeypatch, run, train_on
):
    """One iteration over all windows: every conversation once."""
    data = tmp_path / "data"
    made = ["--input", folder / "chats.jsonl", "--tokenizer", weights, "--val_fraction", "0.8"]
    prepare_here(monkeypatch, *made, "--output", data, "--train_on", train_on)
    documents = stored(data, "train")
    flags = [f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", "--max_epochs=1", "--batch_size=1"]
    assert run(
        folder / "run.py",
        *flags,
        "--eval_iters=1",
        "--max_iters=10000",
        "--learning_rate=1e-20",
        "--min_lr=0",
    ) in (
        0,
        None,
    )
    rows = last_run(tmp_path / "out")["training_iterations"]
    targets = np.array([row["target_percent"] * T / 100 for row in rows])
    ours = float(np.dot(targets, [row["loss"] for row in rows]) / targets.sum())
    assert targets.sum() == pytest.approx(sum(one >= 0 for ids in documents for one in ids[1:]))
    assert ours == pytest.approx(mean_loss(weights, documents), rel=1e-5)


def test_a_killed_run_goes_on_to_the_same_bits(folder, runs):
    command = [folder / "run.py", "--eval_interval=3", f"--out_dir={folder / 'killed'}"]
    process = start_train(*command)
    for line in process.stdout:
        if "step-00000006" in line:
            process.kill()
    assert process.wait() == -9
    resumed = run_train(*command, "--init_from=resume")
    assert resumed.returncode == 0, resumed.stderr
    assert last_run(folder / "killed")["startup_info"]["resumed_from"]
    found, expected = (
        checkpoint_tensors(folder / name / "checkpoints" / f"step-{ITERATIONS:08d}")
        for name in ("killed", "1 x 1 x 16")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- it learns ---


def ask(capsys, questions: list[str], *source: str) -> list[str]:
    """What sample.py --chat says, after the prompt."""
    prompts = [f"--prompt={question}" for question in questions]
    sample.main([*source, "--chat", *prompts, "--temperature=0", "--max_new_tokens=12", "--device=cpu"])
    shown = re.split(r"--- (?:prompt \d+, )?sample 1 ---\n", capsys.readouterr().out)[1:]
    return [text.split("<|im_start|>assistant\n")[1].removesuffix("\n") for text in shown]


def test_a_tuned_model_answers_with_the_right_word_and_stops_also_in_transformers(
    folder, weights, run, capsys
):
    of_validation = [bytes_to_question(weights, ids) for ids in stored(folder / "data", "val")]
    answers = [ANSWERS[question] for question in of_validation]
    before = ask(capsys, of_validation, f"--hf={weights}")
    assert not any(said == answer for said, answer in zip(before, answers, strict=True))
    out = folder / "tuned"
    flags = ["--max_iters=200", "--lr_decay_iters=200", "--warmup_iters=5", "--log_interval=20"]
    assert run(folder / "run.py", f"--out_dir={out}", *flags) in (0, None)
    capsys.readouterr()
    after = ask(capsys, of_validation, f"--out_dir={out}")
    print(list(zip(of_validation, before, after, strict=True)))
    assert after == answers, "the right word, and nothing behind it"
    export_hf.main([str(out), str(folder / "exported")])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    for question, answer in zip(of_validation, answers, strict=True):
        chat = [{"role": "user", "content": question}]
        given = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
        assert tokenizer.decode(made) == f"{answer}<|im_end|>"


def bytes_to_question(weights: Path, ids: list[int]) -> str:
    text = transformers.AutoTokenizer.from_pretrained(weights).decode([max(one, ~one) for one in ids])
    return re.search(r"user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant", text)[1]
