"""data.adopt: an old folder of nanoGPT's becomes a dataset, or is refused with the reason."""

import hashlib
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from support.helpers import TINY, last_run, write_config
from support.preparation import shared, small_bpe

import data.inspect.__main__ as inspect
import sample
from common.errors import UserError
from data import adopt
from data.pipeline import verified
from data.pipeline.meta_file import load_tokenizer, read_meta

EOT = 50256


@pytest.fixture(autouse=True)
def gpt2(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared("tiktoken_cache")))


def write_ids(path: Path, ids, dtype: str = "<u2") -> None:
    np.array(ids).astype(dtype).tofile(path)


@pytest.fixture
def folder(tmp_path):
    """As nanoGPT's data/openwebtext/prepare.py leaves it: two files, no meta.json."""
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", 4000), ("val", 1000)):
        ids = rng.integers(0, 50_000, count)
        ids[99::100] = EOT
        write_ids(folder / f"{split}.bin", ids)
    return folder


def run_adopt(monkeypatch, folder, *flags: str, tokenizer="gpt2") -> None:
    monkeypatch.setattr(sys, "argv", ["adopt", str(folder), f"--tokenizer={tokenizer}", *flags])
    adopt.main()


def refusal(monkeypatch, folder, *flags: str, **options) -> str:
    before = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
    with pytest.raises(UserError) as error:
        run_adopt(monkeypatch, folder, *flags, **options)
    assert {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()} == before
    return str(error.value)


def test_old_folder_trains_samples_and_is_inspected(run, monkeypatch, tmp_path, folder, capsys):
    run_adopt(monkeypatch, folder)
    assert f"--dataset={folder}" in capsys.readouterr().out
    assert "is there: python -m data.inspect --hash compares" in refusal(monkeypatch, folder)
    meta = read_meta(folder)
    with monkeypatch.context() as patch:
        patch.setattr(verified, "scan", pytest.fail)  # what was read whole is not read again
        assert verified.damaged_files(folder, meta["dtype"], meta["files"]) == set()
    assert (meta["dtype"], meta["vocab_size"], meta["eot_id"]) == ("uint16", 50257, EOT)
    for name, tokens in (("train.bin", 4000), ("val.bin", 1000)):
        sha256 = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert meta["files"][name] == {"tokens": tokens, "sha256": sha256, "max_id": EOT}
    keys = {**TINY, "dataset": folder, "vocab_size": 50257, "eval_interval": 2, "max_iters": 2}
    keys |= {"packing": "truncate", "doc_masking": True, "out_dir": tmp_path / "out"}
    assert run(write_config(tmp_path / "run.py", **keys)) == 0
    assert last_run(tmp_path / "out")["status"] == "completed"
    capsys.readouterr()
    sample.main([f"--out_dir={tmp_path / 'out'}", "--max_new_tokens=4", "--device=cpu", "--prompt=a"])
    assert "--- sample 1 ---\na" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["inspect", str(folder), "--hash"])
    inspect.main()
    assert "hashes checked" in capsys.readouterr().out


def test_what_was_read_whole_is_not_read_again_and_its_meta_json_is_kept(monkeypatch, folder):
    run_adopt(monkeypatch, folder)
    monkeypatch.setattr(verified, "scan", pytest.fail)
    meta = read_meta(folder)
    assert verified.damaged_files(folder, meta["dtype"], meta["files"]) == set()
    assert "is there: python -m data.inspect --hash compares" in refusal(monkeypatch, folder)


def test_files_without_end_of_text_are_one_stream(monkeypatch, folder, capsys):
    write_ids(folder / "train.bin", range(1000))
    write_ids(folder / "val.bin", range(500))
    run_adopt(monkeypatch, folder)
    assert read_meta(folder)["eot_id"] is None
    assert "id 50256, the end of a text, is not in the files" in capsys.readouterr().out


class Canary:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "unpickled")


def test_meta_pkl_is_never_unpickled_and_one_of_characters_is_refused(monkeypatch, folder, tmp_path):
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 2, "stoi": Canary(tmp_path / "canary")}))
    message = refusal(monkeypatch, folder)
    assert "are characters" in message
    assert "python data/shakespeare_char/prepare.py --input TEXT --output NEW_FOLDER" in message


WRONG = {
    "odd size": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "not a multiple of 2"),
    "empty": (lambda path: path.write_bytes(b""), "train.bin is empty"),
    "numpy": (lambda path: np.save(path.open("wb"), np.arange(9, dtype="<u2")), "a NumPy array"),
    "llm.c": (lambda path: write_ids(path, [20240520, *255 * [0]], "<u4"), "a token file with a header"),
    "an id past the vocabulary": (
        lambda path: write_ids(path, [*range(999), 50257]),
        "train.bin holds token id 50,257, but the tokenizer has ids 0 to 50,256 only",
    ),
    "begun by prepare": (lambda path: path.with_name("plan.json").touch(), "was begun by a prepare.py"),
    "gone": (lambda path: path.unlink(), "a dataset needs train.bin and val.bin"),
    "4 bytes": (lambda path: write_ids(path, range(1000), "<u4"), "pass --dtype=uint32"),
    "4 bytes of a large vocabulary": (
        lambda path: write_ids(path, np.arange(60_000, 140_000, 100), "<u4"),
        "pass --dtype=uint32",
    ),
    "lengths": (
        lambda path: path.with_name("val.bin.lengths").write_bytes(b""),
        "has document lengths beside it, which are not adopted",
    ),
    "past the vocabulary": (
        lambda path: write_ids(path, [*range(1000), 50257]),
        "train.bin holds token id 50,257, but the tokenizer has ids 0 to 50,256 only",
    ),
    "begun": (
        lambda path: path.with_name("plan.json").write_text("{}"),
        "was begun by a prepare.py; run that again",
    ),
    "8 bytes": (lambda path: write_ids(path, range(1000), "<i8"), "ids of 64 bits must be written again"),
    "a copy of val": (
        lambda path: path.write_bytes(path.with_name("val.bin").read_bytes()),
        "val.bin holds the same as train.bin",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_token_ids_is_refused(monkeypatch, folder, kind):
    change, message = WRONG[kind]
    change(folder / "train.bin")
    assert message in refusal(monkeypatch, folder)


def widen(folder: Path, dtype: str) -> None:
    """Both files, with ids of that type instead of two bytes."""
    for split in ("train", "val"):
        write_ids(folder / f"{split}.bin", np.fromfile(folder / f"{split}.bin", "<u2"), dtype)


@pytest.mark.parametrize(("dtype", "wider"), [("uint16", "<u4"), ("uint32", "<i8")])
def test_a_type_that_is_named_is_compared_with_the_ids_too(monkeypatch, folder, dtype, wider):
    widen(folder, wider)
    assert f"if ids are {dtype}, so they have more bits" in refusal(monkeypatch, folder, f"--dtype={dtype}")


def test_ids_of_four_bytes_are_adopted_if_they_are_named(monkeypatch, folder):
    widen(folder, "<u4")
    run_adopt(monkeypatch, folder, "--dtype=uint32")
    assert read_meta(folder)["dtype"] == "uint32" and read_meta(folder)["files"]["val.bin"]["tokens"] == 1000


def test_a_wrong_eot_is_said_before_the_files_are_read(monkeypatch, folder):
    monkeypatch.setattr(adopt, "describe_files", lambda *arguments: pytest.fail("the files were read"))
    assert "the tokenizer has no token <nothing>" in refusal(monkeypatch, folder, "--eot=<nothing>")
    (folder / "tokenizer.json").write_text("{}")
    assert "is not the tokenizer that --tokenizer names" in refusal(monkeypatch, folder)


def test_folder_that_is_not_there_is_named(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="there is no folder .*absent"):
        run_adopt(monkeypatch, tmp_path / "absent", tokenizer="absent too")  # nor looked for


def test_tokenizer_file_is_kept_with_the_tokens(monkeypatch, folder, tmp_path):
    bpe = small_bpe(tmp_path / "bpe")
    for split, count in (("train", 1000), ("val", 500)):
        write_ids(folder / f"{split}.bin", np.arange(count) % 257)
    run_adopt(monkeypatch, folder, tokenizer=bpe)
    bpe.unlink()
    assert load_tokenizer(folder).encode("a") == [ord("a") - 33] and read_meta(folder)["eot_id"] == 256
