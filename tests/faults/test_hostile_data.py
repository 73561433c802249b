"""Data that somebody else wrote or damaged: no link is written through, no file on disk is believed before it
is checked, and no number or empty path makes a traceback."""

import contextlib
import gzip
import json
import os
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.helpers import edit_json, make_dataset
from support.hostile_files import no_hang, pairs  # noqa: F401 - no_hang is a fixture
from support.preparation import small_bpe, write_jsonl, write_small
from support.three_parts import config, contents, corpus, make

import data.inspect.__main__ as inspect
from common.command import run_command
from common.errors import UserError
from data.folders import dataset_folder
from data.pipeline import verified
from data.pipeline.dataset_tokenizer import load_tokenizer
from data.pipeline.hub import open_hub
from data.pipeline.input_files import find_files
from data.pipeline.meta_file import read_meta
from data.pipeline.parts import Settings
from data.pipeline.preparation import prepare
from data.pipeline.workers import Job
from data.shakespeare_char import prepare as shakespeare_char
from data.text import prepare as text_prepare
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tokenizer import open_tokenizer
from training.batches.dataset import open_dataset
from training.configuration import dataset_name
from training.configuration.dataset_name import parse_dataset

SECRET = b"somebody else's file"


# --- nothing is written through a link ---

WRITTEN = ("plan.json", "parts/000000.json", "meta.json", "meta.pkl", "tokenizer.json")
NAMES = [
    *(".prepare.lock", ".part-finish.lock", ".part-0-of-2.lock", "train_000000.bin", "train.bin"),
    *(f"{name}{end}" for name in (*WRITTEN, ".verified.json") for end in ("", ".tmpPID")),
    *("train_000000_000.bin.tmp", "train_000.bin.tmp", "val_000.bin.tmp"),
    *("meta.json.tmp", "meta.pkl.tmp", "tokenizer.json.tmp"),
]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_no_link_in_the_folder_is_written_through(tmp_path, bpe, here, name, resume):
    def planted(folder: Path) -> Path:
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)
        return folder

    name = name.replace("PID", str(os.getpid()))
    outside = tmp_path / "outside"
    outside.write_bytes(SECRET)
    folder = planted(tmp_path / "large")
    for job in ({"resume": resume}, {"part_bytes": None}):
        with contextlib.suppress(UserError):  # it may refuse what it finds
            make(folder, bpe, **job)
    with contextlib.suppress(UserError):
        write_small(planted(tmp_path / "small"), tokenizer=FileTokenizer(bpe).meta, vocab_size=257)
    assert outside.read_bytes() == SECRET


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with somebody else's file, in which nothing may change."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(SECRET)
    yield folder
    assert contents(folder) == {"a.jsonl": SECRET}


@pytest.mark.parametrize("resume", [True, False])
def test_parts_folder_that_is_a_link_is_refused(tmp_path, bpe, here, resume, elsewhere):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "parts").symlink_to(elsewhere)
    with pytest.raises(UserError, match="parts is a link"):
        make(tmp_path / "out", bpe, resume=resume)


def test_dataset_folder_may_be_a_link(tmp_path, bpe, here):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert make(tmp_path / "out", bpe) == read_meta(tmp_path / "disk")
    assert open_dataset(config(tmp_path / "out", vocab_size=257, block_size=8), scan=True)


def test_download_goes_through_no_link_inside_its_folder(tmp_path, elsewhere):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train").symlink_to(elsewhere)
    hub = hub_of(tmp_path, {"train/a.jsonl": [5, None]})
    with pytest.raises(UserError, match="train leads elsewhere by a link"):
        hub.fetch([str(tmp_path / "text" / "train" / "a.jsonl")])


def hub_of(folder: Path, files: object, **fields):
    content = {"repository": "o/n", "commit": "c", "files": files, **fields}
    (folder / "hub.json").write_text(json.dumps(content))
    return open_hub("o/n", folder / "text", folder / "hub.json", keep=False)


# --- every file is hostile until it is checked ---


HOSTILE = {
    "deep": lambda path: path.write_text("[" * 200_000),
    "deep object": lambda path: path.write_text('{"a":' * 200_000),
    "long number": lambda path: path.write_text('{"format": ' + "9" * 5000 + "}"),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "empty": lambda path: path.write_bytes(b""),
    "list": lambda path: path.write_text("[1]"),
    "null": lambda path: path.write_text("null"),
    "empty object": lambda path: path.write_text("{}"),
    "named pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to(path.with_name("absent")),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_meta_is_one_message_of_every_reader(tmp_path, kind):
    folder = make_dataset(tmp_path / "tokens")
    (folder / "meta.json").unlink()
    HOSTILE[kind](folder / "meta.json")
    assert refusals(folder) == 3


def refusals(folder: Path) -> int:
    """How many of the three users of meta.json refuse it with its name."""
    calls = (
        lambda: open_dataset(config(folder), scan=True),
        lambda: load_tokenizer(folder),
        lambda: inspect.check_files(folder, read_meta(folder), hashes=True),
    )
    refused = 0
    for call in calls:
        try:
            call()
        except UserError as error:
            assert "meta.json" in str(error), error
            refused += 1
    return refused


WRONG_FIELDS = {
    "vocab_size": [0, True, 10**400, 64.0, -1, []],
    "dtype": [{}, None],
    "format": [True, 2, "1"],
    "eot_id": [True, 1e300, 64],
    "source": [5],
    "documents": ["many"],
    "bad": [-1],
    "files": [
        *(5, {"train.bin": None}),
        *({name: {}} for name in ("a/b.bin", "a\nb.bin", "\ud800.bin", "../b.bin", "/etc/passwd", "..", "")),
        *({"train.bin": {"tokens": tokens}} for tokens in (True, 10**400)),
        *({"train.bin": {"max_id": max_id}} for max_id in ("7", -7)),
        *({"train.bin": {"sha256": sha256}} for sha256 in (5, "abc")),
    ],
    "tokenizer": [
        *(5, ["gpt2"], {"kind": 5}, {"kind": "tiktoken", "name": []}, {"kind": "char", "chars": 5}),
        {"kind": "tokenizers", "name": "x", "file": "../x", "sha256": "0"},
    ],
}


@pytest.mark.parametrize("name, value", pairs(WRONG_FIELDS))
def test_wrong_field_of_meta_is_refused_by_every_reader(tmp_path, name, value):
    folder = make_dataset(tmp_path / "tokens")
    edit_json(folder / "meta.json", **{name: value})
    assert refusals(folder) == 3


def test_meta_that_begins_with_a_byte_order_mark_is_read(tmp_path):
    folder = make_dataset(tmp_path / "tokens")
    (folder / "meta.json").write_bytes(b"\xef\xbb\xbf" + (folder / "meta.json").read_bytes())
    assert open_dataset(config(folder), scan=True) and read_meta(folder)["vocab_size"] == 64


def make_again(bpe: Path, out: Path, name: str, spoil) -> None:
    """A dataset in which this manifest is spoilt becomes what it was."""
    make(out, bpe)
    wanted = contents(out)
    spoil(out / name)
    make(out, bpe)
    assert contents(out) == wanted


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["parts/000000.json", ".verified.json"])
def test_hostile_manifest_or_memory_is_made_again(tmp_path, bpe, here, name, kind):
    out, spoil = tmp_path / "out", lambda path: (path.unlink(), HOSTILE[kind](path))
    if kind == "folder":  # no file can take its place, and it is not ours to delete
        with contextlib.suppress(OSError, AssertionError):
            make_again(bpe, out, name, spoil)
        return
    make_again(bpe, out, name, spoil)
    assert verified.recall(out).keys() >= read_meta(out)["files"].keys()


A_FILE = {"tokens": 1, "sha256": "0" * 64, "max_id": 0}
WRONG_MANIFESTS = [
    *({"files": files} for files in ([], {"../outside.bin": A_FILE}, {"train_000001.bin": A_FILE})),
    *({"file": fields} for fields in ({"tokens": True}, {"tokens": "5"}, {"sha256": None}, {"max_id": -5})),
    *({"documents": None}, {"documents": -1}, {"bad": 1e400}, {"bad_records": [5]}, {"bad_records": "text"}),
]


@pytest.mark.parametrize("change", WRONG_MANIFESTS, ids=str)
def test_manifest_with_a_wrong_field_counts_as_none(tmp_path, bpe, here, change):
    def spoil(path: Path) -> None:
        files = json.loads(path.read_text())["files"]
        if "file" in change:
            edit_json(path, files={name: file | change["file"] for name, file in files.items()})
        else:
            edit_json(path, **change)

    make_again(bpe, tmp_path / "out", "parts/000000.json", spoil)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_plan_is_one_message(tmp_path, bpe, here, kind):
    make(tmp_path / "out", bpe)
    (tmp_path / "out" / "plan.json").unlink()
    HOSTILE[kind](tmp_path / "out" / "plan.json")
    with pytest.raises(UserError, match="--no-resume"):
        make(tmp_path / "out", bpe)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_hub_listing_is_one_message(tmp_path, kind):
    HOSTILE[kind](tmp_path / "hub.json")
    if not (tmp_path / "hub.json").is_file():
        return  # it counts as none, and the hub is asked
    with pytest.raises(UserError, match=r"hub\.json"):
        open_hub("o/n", tmp_path / "text", tmp_path / "hub.json", keep=True)


WRONG_LISTINGS = [
    *({}, []),
    *({name: 5} for name in ("../../a.jsonl", "/etc/a.jsonl", "a/../b.jsonl", "a.exe")),
    *({"a.jsonl": entry} for entry in ("5", [], -5, [-5, None], True, None)),
]


@pytest.mark.parametrize("files", WRONG_LISTINGS, ids=str)
def test_hub_listing_with_a_wrong_entry_is_refused(tmp_path, files):
    with pytest.raises(UserError, match="is damaged.*delete it"):
        hub_of(tmp_path, files)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_hostile_tokenizer_file_is_one_message(tmp_path, name, kind):
    HOSTILE[kind](tmp_path / name)
    with pytest.raises(UserError):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", sorted(HOSTILE.keys() - {"empty object"}))
@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"])
def test_hostile_file_beside_a_tokenizer_is_one_message(tmp_path, name, kind):
    small_bpe(tmp_path)
    HOSTILE[kind](tmp_path / name)
    with pytest.raises(UserError, match="and the files beside it are not one tokenizer"):
        open_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80" * 1_000_000,  # a number without end
        b"\x0a\x02\x18\x02",  # a piece without its text
        b"\x0a\x04\x0a\x02ab",  # no piece for unknown text
        b"IQ== 0\nIg== 7\n",  # ranks that are not 0, 1, 2, ...
        b"IQ== 0\nIg==\n",
    ],
)
def test_hostile_tokenizer_model_is_one_message(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.model is not"):
        open_tokenizer(str(tmp_path))


def test_hostile_tokenizer_config_is_one_message(bpe):
    (bpe.parent / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"0": 5}}')
    with pytest.raises(UserError, match="are not one tokenizer"):
        open_tokenizer(str(bpe))


def test_tokenizer_json_that_begins_with_a_byte_order_mark_is_read(bpe):
    bpe.write_bytes(b"\xef\xbb\xbf" + bpe.read_bytes())
    assert FileTokenizer(bpe).encode("a") == [ord("a") - 33]


# --- token files and input that are no regular files ---

SPECIAL = {name: HOSTILE[name] for name in ("named pipe", "folder", "dangling link", "device")}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("by_hand", [True, False])
def test_token_file_that_is_no_regular_file_is_named(tmp_path, kind, by_hand):
    folder = make_dataset(tmp_path / "tokens")
    if by_hand:
        (folder / "meta.json").write_text('{"dtype": "uint16", "vocab_size": 64}')
    meta = read_meta(folder)
    (folder / "train.bin").unlink()
    SPECIAL[kind](folder / "train.bin")
    for call in (
        lambda: open_dataset(config(folder), scan=True),
        lambda: inspect.check_files(folder, meta, hashes=True),
    ):
        with pytest.raises(UserError, match=r"train\.bin"):
            call()


def test_dataset_that_cannot_be_named_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("/" + "a" * 5000, "~nobody-of-this-name/x", "a/\0b", str(tmp_path / "file")):
        with pytest.raises(UserError):
            open_dataset(config(Path("x"), dataset=name), scan=True)
    for name in ("..", "."):
        with pytest.raises(UserError, match="no name of a folder in data"):
            dataset_folder(name)


@pytest.mark.parametrize("kind", SPECIAL)
def test_input_that_is_no_regular_file_is_named(tmp_path, kind):
    SPECIAL[kind](tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl|nothing in it"):
        find_files([str(tmp_path / "*.jsonl")])


def test_folder_whose_name_ends_like_a_file_is_searched(tmp_path):
    (tmp_path / "part.jsonl").mkdir()
    path = write_jsonl(tmp_path / "part.jsonl" / "a.jsonl", ["a"])
    assert find_files([str(tmp_path)]) == [path]


def archives() -> dict[str, bytes]:
    zstandard = pytest.importorskip("zstandard")
    content = b"".join(json.dumps({"text": os.urandom(9).hex()}).encode() + b"\n" for _ in range(50))
    made = dict.fromkeys(("zero.jsonl", "zero.jsonl.gz", "zero.jsonl.zst", "zero.parquet"), b"")
    for end, frame in {"gz": gzip.compress(content), "zst": zstandard.compress(content)}.items():
        made[f"cut.jsonl.{end}"] = frame + frame[: len(frame) // 2]  # two frames, the second without its end
        made[f"header.jsonl.{end}"] = frame + frame[:5]
    return made | {"short.parquet": b"PAR1"}


@pytest.mark.parametrize("name", archives())
def test_empty_or_cut_archive_is_an_error_with_its_name(tmp_path, bpe, here, name):
    path = tmp_path / name
    path.write_bytes(archives()[name])
    good = corpus(tmp_path / "good")
    arguments = (tmp_path / "out", FileTokenizer(bpe), Settings(256, None, 0.3, 10**6), "test")
    with pytest.raises(UserError, match=f"{name} is (damaged|empty)"):
        prepare([*good, path], *arguments, Job())
    assert not (tmp_path / "out" / "meta.json").exists()
    assert prepare([*good, path], *arguments, Job(max_bad=1))["bad"] == 1


def test_text_that_begins_with_a_byte_order_mark_holds_none(tmp_path, bpe, here):
    texts = {"a.txt": "some text of a file", "b.jsonl": '{"text": "first"}\n{"text": "second"}\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        settings, out = Settings(256, None, 0.3, 10**6), tmp_path / f"{name}-out"
        meta = prepare([tmp_path / name], out, FileTokenizer(bpe), settings, "t", Job())
        assert meta["bad"] == 0
        ids = np.concatenate([np.fromfile(out / file, "<u2") for file in meta["files"]])
        assert "\ufeff" not in FileTokenizer(bpe).decode(ids)
    assert shakespeare_char.read_text(str(tmp_path / "a.txt")) == texts["a.txt"]


# --- numbers and paths that cannot be meant ---


ENDLESS = ["1e999999999", "1E+999999999", "1e-999999999", "9" * 5000]  # to compute them takes hours


@pytest.mark.parametrize("weight", [*ENDLESS, "1/1e9", "nan", "inf", "1e99", "1e-99"])
def test_weight_beyond_sense_is_one_message(weight, monkeypatch):
    computed = []
    fraction = lambda number: computed.append(number) or Fraction(number)  # noqa: E731
    monkeypatch.setattr(dataset_name, "Fraction", fraction)
    with pytest.raises(UserError, match="dataset='a:"):
        parse_dataset(f"a:{weight},b:1")
    assert weight not in ENDLESS or weight not in computed


def run_text(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
    text_prepare.main()


BEYOND_SENSE = {
    "--workers": [10**20, -1],
    "--max_tokens": [10**400, "9" * 5000, "1e3"],
    "--shard_tokens": [10**400, 0],
    "--max_bad": [10**400],
    "--val_fraction": ["nan", "1e999999"],
    "--output": ["", " ", "~nobody-of-this-name/x"],
    "--input": [""],
    "--tokenizer": [""],
}


@pytest.mark.parametrize("flag, value", pairs(BEYOND_SENSE))
def test_option_beyond_sense_is_one_message(tmp_path, bpe, monkeypatch, capsys, flag, value):
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "in")
    before = contents(tmp_path)
    words = ["--input", "in", "--tokenizer", bpe, "--output", "out"]
    with pytest.raises(SystemExit) as end:
        run_text(monkeypatch, *words, flag, value)
    error = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and f"{flag}" in error and len(error) < 400
    assert contents(tmp_path) == before


def test_so_many_shards_that_their_names_would_not_sort_are_refused(tmp_path, bpe, here):
    path = write_jsonl(tmp_path / "a.jsonl", ["a" * 1500, "b"])
    with pytest.raises(UserError, match="--shard_tokens=1 makes more than 1,000 files"):
        prepare([path], tmp_path / "out", FileTokenizer(bpe), Settings(256, None, 0.1, 1), "test", Job())


@pytest.mark.parametrize("flag, value", [("--samples", 10**20), ("--length", 0), ("--seed", -1)])
def test_inspect_refuses_numbers_beyond_sense(tmp_path, monkeypatch, capsys, flag, value):
    monkeypatch.setattr(sys, "argv", ["inspect", str(make_dataset(tmp_path)), flag, str(value)])
    with pytest.raises(SystemExit):
        inspect.main()
    assert f"argument {flag}: {value} is not between" in capsys.readouterr().err


def test_inspect_shows_no_control_characters_of_meta(tmp_path, monkeypatch, capsys):
    folder = make_dataset(tmp_path / "tokens")
    edit_json(folder / "meta.json", source="\x1b[2J\ud800 text")
    monkeypatch.setattr(sys, "argv", ["inspect", str(folder)])
    inspect.main()
    shown = capsys.readouterr().out
    assert "?[2J? text" in shown and "\x1b" not in shown


def test_disk_that_refuses_is_one_message(tmp_path, bpe, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    corpus(tmp_path / "in")
    words = ["--input", tmp_path / "in", "--tokenizer", bpe, "--output"]
    for output in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("a" * 300)):
        assert run_command(run_text, monkeypatch, *words, output) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and output.name[:20] in error


def test_home_folder_is_found_in_every_dataset_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dataset_folder("~/x") == tmp_path / "x"
