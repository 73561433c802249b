"""Own text in one command: what is read, the tokenizer trained on it, and the commands that follow."""

import json
import os
import random
import shlex
import sys
from pathlib import Path

import pytest
from support.corpora import HARD, tokens_and_meta
from support.helpers import ROOT, last_run
from support.preparation import read_ids, read_texts, run_parts_here, small_bpe, write_jsonl

import sample
from common.command import USER_ERROR, run_command
from common.errors import UserError
from data.pipeline import trained_tokenizer
from data.pipeline.dataset_tokenizer import load_tokenizer
from data.pipeline.input_files import find_input
from data.pipeline.meta_file import read_meta
from data.pipeline.parts import Settings, plan_parts
from data.pipeline.preparation import with_threshold
from data.pipeline.trained_tokenizer import pieces, training_documents
from data.text import prepare as text_prepare
from data.tokenizers.bpe_training import train_bpe
from plots import plot_single_run

WORDS = [f"{a}{b}{c}" for a in "bdfgkl" for b in "aeiou" for c in ("n", "r", "st", "ck", "")]


def prose(seed: int, words: int = 300) -> str:
    chosen = random.Random(seed).choices(WORDS, k=words)
    return " ".join(chosen) + ".\n"


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "in"
    for number in range(24):
        path = folder / f"part{number % 3}" / f"{number:02}{('.md', '.txt', '.py')[number % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(prose(number))
    return folder


@pytest.fixture
def prepare(monkeypatch, capsys):
    """prepare(*arguments): what the command prints. A UserError is raised."""
    monkeypatch.setattr("data.pipeline.preparation.run_parts", run_parts_here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # commands for a CPU, on any machine

    def prepare(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
        capsys.readouterr()
        text_prepare.main()
        return capsys.readouterr().out

    return prepare


def train(corpus: Path, out: Path, ids: int = 400) -> list:
    return ["--input", corpus, "--train_tokenizer", ids, "--output", out, "--val_fraction", 0.1]


def contents(folder: Path) -> dict[str, bytes]:
    return tokens_and_meta(folder) | {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}


# --- the whole path ---


def test_from_a_folder_of_text_the_printed_commands_train_plot_and_sample(
    prepare, corpus, run, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "my text"
    lines = dict(line.split(maxsplit=1) for line in prepare(*train(corpus, out)).splitlines()[-4:])
    assert list(lines) == ["model", "next", "plot", "sample"]
    commands = {name: shlex.split(lines[name].rpartition("&& ")[2]) for name in ("next", "plot", "sample")}
    _, script, config, *flags = commands["next"]
    assert script == "train.py" and f"--dataset={out}" in flags and "--out_dir=out-my text" in flags
    config = str(ROOT / config)
    monkeypatch.chdir(tmp_path)
    small = ("--max_iters=3", "--peak_tflops=1", "--eval_iters=1", "--n_layer=1", "--block_size=32")
    assert run(config, *flags, *small) == 0
    assert last_run(tmp_path / "out-my text")["training_iterations"][-1]["iter"] == 2
    _, script, pattern = commands["plot"]
    assert script == "plots/plot_single_run.py" and plot_single_run.main([pattern]) == 0
    (plot,) = (tmp_path / "out-my text").glob("run_*.png")
    assert plot.stat().st_size > 10_000
    capsys.readouterr()
    _, script, *flags = commands["sample"]
    assert script == "sample.py" and flags == ["--out_dir=out-my text"]
    sample.main([*flags, "--prompt=ban dar", "--max_new_tokens=3", "--device=cpu"])
    assert "ban dar" in capsys.readouterr().out


# --- the tokenizer ---


def test_the_trained_tokenizer_is_the_same_again_encodes_any_text_and_transformers_opens_it(
    prepare, corpus, tmp_path
):
    folders = [tmp_path / name / "out" for name in ("first", "second")]
    for folder in folders:
        prepare(*train(corpus, folder))
    first, second = map(contents, folders)
    assert first == second and {"tokenizer.json", "tokenizer_config.json", "train.bin"} <= first.keys()
    meta, ours = read_meta(folders[0]), load_tokenizer(folders[0])
    assert (meta["vocab_size"], meta["eot_id"], meta["documents"]) == (400, 0, 24)
    for text in [*HARD, "".join(map(chr, range(0x300))), "\U0010ffff\x00\r"]:
        ids = ours.encode(text)
        assert ours.decode(ids) == text and 0 not in ids
    assert len(ours.encode("ban dar")) < 7
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folders[0])
    assert theirs.eos_token_id == 0 and theirs(prose(99)).input_ids == ours.encode(prose(99))


def test_the_same_command_goes_on_and_trains_no_other_tokenizer(prepare, corpus, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole/out", tmp_path / "out"
    assert "training a tokenizer of 400 ids" in prepare(*train(corpus, whole))

    def killed(*arguments):
        raise KeyboardInterrupt

    for place in ("write_json", "write_content"):  # before the record, before the tokenizer is there
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(trained_tokenizer, place, killed)
            prepare(*train(corpus, out))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data.pipeline.preparation.run_parts", killed)  # while the tokens are made
        prepare(*train(corpus, out))
    monkeypatch.setattr(trained_tokenizer, "train_bpe", killed)
    prepare(*train(corpus, out))
    assert contents(out) == contents(whole)
    (out / "tokenizer.json").unlink()
    monkeypatch.setattr(trained_tokenizer, "train_bpe", train_bpe)
    prepare(*train(corpus, out))
    assert contents(out) == contents(whole)


@pytest.mark.parametrize(
    "change",
    [["--train_tokenizer", 300], ["--eot", "<end>"], ["--val_fraction", 0.2], ["--text_key", "body"]],
)
def test_another_tokenizer_in_the_same_folder_is_refused_and_changes_nothing(
    prepare, corpus, tmp_path, change
):
    prepare(*train(corpus, tmp_path / "out"))
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="was begun with another .*--no-resume"):
        prepare(*train(corpus, tmp_path / "out"), *change)
    assert contents(tmp_path / "out") == before
    prepare(*train(corpus, tmp_path / "out"), *change, "--no-resume")
    assert contents(tmp_path / "out") != before


def test_a_dataset_of_another_tokenizer_or_column_keeps_it(prepare, corpus, tmp_path):
    path = write_records(
        tmp_path / "a.jsonl", [{"text": prose(i), "body": prose(i + 100)} for i in range(30)]
    )
    prepare(*train(corpus, tmp_path / "bpe"))
    given = ["--input", path, "--tokenizer", tmp_path / "bpe", "--output", tmp_path / "out"]
    prepare(*given, "--text_key=body")
    before = contents(tmp_path / "out")
    for arguments, differs in ((given, "text_key"), (train(path, tmp_path / "out"), "tokenizer")):
        with pytest.raises(UserError, match=f"was begun with another {differs}"):
            prepare(*arguments)
    assert contents(tmp_path / "out") == before


def test_too_many_ids_for_the_text_are_told_and_what_results_works(prepare, corpus, tmp_path):
    printed = prepare(*train(corpus, tmp_path / "out", 30_000))
    ids = read_meta(tmp_path / "out")["vocab_size"]
    assert 257 < ids < 30_000 and f"warning: it has {ids:,} ids, not 30,000: no other pair" in printed
    assert f"--vocab_size={ids} " in printed
    assert "little text for 400 ids, so many will be rare; 512 would fit" not in prepare(
        *train(corpus, tmp_path / "fewer", 260)
    )
    assert "warning: little text for 400 ids" in prepare(*train(corpus, tmp_path / "more"))


def parts_of(*paths: Path) -> list:
    return plan_parts(list(paths), Settings(0, None, 0.1, 1000))[0]


def texts(documents) -> list[str]:
    return ["".join(document) for document in documents]


def test_the_tokenizer_learns_from_no_document_that_is_held_out(prepare, tmp_path):
    """Whether a hash chooses those for validation, or none, or there is only one document."""
    rows = [f"number {i} {prose(i, 30)}" for i in range(60)]
    for name, count, fraction in (("many", 60, 0.2), ("few", 2, 0.001), ("all", 3, 0.999), ("one", 1, 0.3)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", rows[:count])
        settings = with_threshold(Settings(0, None, fraction, 1000), parts_of(path))
        learned = texts(training_documents(parts_of(path), settings, [].append, 10**9))
        out = tmp_path / name
        arguments = ["--input", path, "--output", out, "--train_tokenizer", 300, "--val_fraction", fraction]
        prepare(*arguments)
        train_text, val_text = map(load_tokenizer(out).decode, (read_ids(out, "train"), read_ids(out, "val")))
        assert val_text
        if count == 1:  # cut at a token, near the character where the training text was cut
            assert len(learned) == 1 and rows[0].startswith(learned[0])
            assert abs(len(learned[0]) - len(train_text)) < 0.2 * len(rows[0])
        else:
            assert "".join(f"{text}<|endoftext|>" for text in learned) == train_text


def test_of_very_much_text_every_kth_document_is_read_and_others_are_not_opened(tmp_path, monkeypatch):
    paths = [tmp_path / f"{i:03}.txt" for i in range(100)]
    for i, path in enumerate(paths):
        path.write_text(f"{i:03}" + "x" * 997)
    parts, settings = parts_of(*paths), Settings(0, None, 1e-9, 1000)
    documents = training_documents(parts, settings, [].append, 10_000)
    first = next(documents)
    for path in paths[1::10]:
        path.unlink()
    assert [text[:3] for text in texts([first, *documents])] == [f"{i:03}" for i in range(0, 100, 10)]
    monkeypatch.setattr(trained_tokenizer, "PIECE_CHARS", 100)
    assert sum(map(len, pieces([["é" * 3000], ["b" * 3000]], 7000))) == 4000


# --- what is read ---


def test_files_of_a_folder_that_are_no_text_are_left_out_and_listed(tmp_path, prepare, corpus, capsys):
    made = {
        "a.png": b"\x89PNG",
        "zero.txt": b"ab\0cd",
        "latin.md": b"caf\xe9",
        "utf16.txt": "\ufeffhello".encode("utf-16-le"),
        "nothing.txt": b"",
        ".hidden.txt": b"secret",
        ".git/config.txt": b"[core]",
        "cut.txt": b"caf\xc3",
        "z_copy.md": prose(0).encode(),
    }
    for name, content in made.items():
        (corpus / name).parent.mkdir(exist_ok=True)
        (corpus / name).write_bytes(content)
    os.symlink("..", corpus / "circle")
    os.symlink("loop.txt", corpus / "loop.txt")
    files, left_out = find_input([str(corpus)])
    reasons = {path.name: reason for path, reason in left_out.items()}
    assert reasons == {
        "a.png": "unknown suffix",
        "zero.txt": "binary",
        "latin.md": "not UTF-8 text",
        "utf16.txt": "not UTF-8 text",
        "cut.txt": "not UTF-8 text",
        "nothing.txt": "empty",
        "z_copy.md": "copy of another file",
        ".hidden.txt": "hidden",
        ".git": "hidden folder",
        "circle": "link to a folder",
        "loop.txt": "cannot be read: Too many levels of symbolic links",
    }
    assert len(files) == 24
    printed = prepare(*train(corpus, tmp_path / "out"))
    assert f"left out 1 (binary): {corpus / 'zero.txt'}" in printed


@pytest.mark.parametrize("tokenizer", ["--train_tokenizer=300", "--tokenizer"])
def test_of_files_that_a_glob_names_all_bad_ones_are_named_and_max_bad_counts_them(
    tmp_path, prepare, corpus, tokenizer
):
    bad = [corpus / f"part1/{name}.txt" for name in ("latin", "utf16", "cut")]
    for path, content in zip(bad, (b"caf\xe9", "\ufeffhello".encode("utf-16-le"), b"caf\xc3"), strict=True):
        path.write_bytes(prose(7).encode() * 900 + content)  # the fault is in the second chunk
    words = [tokenizer] if "=" in tokenizer else [tokenizer, small_bpe(tmp_path / "bpe")]
    command = ["--input", corpus / "**/*.*", *words, "--output", tmp_path / "out"]
    for allowed in (0, 2):
        with pytest.raises(
            UserError, match=f"3 bad records in all, more than --max_bad={allowed}"
        ) as refusal:
            prepare(*command, f"--max_bad={allowed}")
        assert all(f"{path} is not UTF-8 text" in str(refusal.value) for path in bad)
    printed = prepare(*command, "--max_bad=3")
    meta = read_meta(tmp_path / "out")
    assert (meta["documents"], meta["bad"]) == (24, 3) and "left out 3 bad records" in printed
    for path in bad:
        path.unlink()
    command[-1] = tmp_path / "without"
    prepare(*command)
    names = ("train.bin", "val.bin", "tokenizer.json")
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == [
        (tmp_path / "without" / name).read_bytes() for name in names
    ]


def test_a_bad_file_that_is_repaired_in_place_is_read(tmp_path, prepare, corpus):
    path = corpus / "part1/latin.txt"
    path.write_bytes(b"caf\xe9 ")
    command = ["--input", corpus / "**/*.*", "--output", tmp_path / "out"]
    command += ["--tokenizer", small_bpe(tmp_path / "bpe")]
    with pytest.raises(UserError, match="1 bad records in all"):
        prepare(*command)
    path.write_bytes(b"cafe ")  # of the same size, so it is the same plan
    prepare(*command, "--max_bad=1")
    assert (read_meta(tmp_path / "out")["documents"], read_meta(tmp_path / "out")["bad"]) == (25, 0)


def test_names_with_odd_characters_are_read_and_shown_without_harm(tmp_path, prepare, corpus):
    names = ["a b'\"$(x).txt", "[draft]*.md", "né 日本.txt", "line\nbreak.txt", os.fsdecode(b"latin\xe9.txt")]
    for name in [*names, "\x1b[2J\n.png"]:
        (corpus / name).write_text(prose(1000 + len(name)))
    printed = prepare(*train(corpus, tmp_path / "out"))
    assert read_meta(tmp_path / "out")["documents"] == 24 + len(names)
    assert "\x1b" not in printed and "left out 1 (unknown suffix): " in printed


# --- names with brackets ---


def test_a_pattern_below_a_folder_with_brackets_in_its_name_finds_its_files(tmp_path):
    folder = tmp_path / "[D_DATA] (1)"
    folder.mkdir()
    path = write_jsonl(folder / "part[1].jsonl", ["a"])
    for pattern in (folder, folder / "*.jsonl", folder / "part[[]1].jsonl", path, tmp_path / "*" / "*.jsonl"):
        assert find_input([str(pattern)])[0] == [path]
    with pytest.raises(UserError, match=r"\[\[\] stands for a bracket of a name"):
        find_input([str(folder / "*t[1].jsonl")])


# --- what is wrong with an option is said before the work ---


@pytest.mark.parametrize("flags", [["--bos=<s>"], ["--bos="], ["--bos=a", "--eot=b"]])
def test_a_token_that_a_trained_tokenizer_will_not_have_is_refused_before_it_is_trained(
    corpus, tmp_path, prepare, capsys, flags
):
    with pytest.raises(SystemExit):
        prepare(*train(corpus, tmp_path / "out", 300), *flags)
    assert "the only special token of a trained tokenizer is" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- other columns ---


def write_records(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_text_in_another_column_is_read_by_its_name(tmp_path, prepare, name):
    rows = [{"id": i, "title": f"T{i}", "body": prose(i)} for i in range(30)]
    path = write_records(tmp_path / name, rows)
    arguments = train(path, tmp_path / "out", 300)
    with pytest.raises(UserError) as error:
        prepare(*arguments)
    line = str(error.value)
    assert (
        line.startswith(f"no column 'text' in {path}")
        and "it has: id, title, body; use --text_key=body" in line
    )
    assert not (tmp_path / "out").exists()
    prepare(*arguments, "--text_key=body")
    assert set(read_texts(tmp_path / "out", "train")) < {row["body"] for row in rows}
    with pytest.raises(UserError, match="use --text_key=body"):
        prepare(*arguments, "--text_key=content", "--no-resume")


# --- bad input ---


def broken_lines(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "cut o\n{"text": "fine, too"}\n')
    return path


def empty_folder(folder: Path) -> Path:
    (folder / "x.png").touch()
    return folder


def unknown_kind(folder: Path) -> Path:
    (folder / "a.pdf").touch()
    return folder / "a.pdf"


def circle(folder: Path) -> Path:
    (folder / "l.txt").symlink_to("l.txt")
    return folder / "l.txt"


BAD = {
    "no folder": (lambda f: f / "absent", [], "absent: there is no such file or folder"),
    "nothing to read": (empty_folder, [], "nothing in it can be read as text (files: 1 unknown suffix)"),
    "unknown kind": (unknown_kind, [], "a.pdf: this kind cannot be read; names must end in .jsonl"),
    "broken lines": (broken_lines, [], "a.jsonl, line 2 is not a JSON object"),
    "link in a circle": (circle, [], "l.txt: a link to nothing, or not a regular file"),
    "few ids": (lambda f: f, ["--train_tokenizer=10"], "10 is not between 257 and 1,048,576"),
    "two tokenizers": (lambda f: f, ["--tokenizer=gpt2"], "not allowed with argument --train_tokenizer"),
}


@pytest.mark.parametrize("make, more, wanted", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, capsys, make, more, wanted):
    (tmp_path / "in").mkdir()
    arguments = ["--input", make(tmp_path / "in"), "--output", tmp_path / "out", "--train_tokenizer=300"]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments), *more])
    assert run_command(text_prepare.main) == USER_ERROR
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert wanted in error and "Traceback" not in error
