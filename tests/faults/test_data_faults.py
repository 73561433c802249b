"""Tokens that are not those of the model, or not those that a checkpoint
was trained on, are found before the first step, on the CPU. Nothing wraps, nothing is guessed."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.helpers import TINY, edit_json, make_dataset, write_config

from common.errors import UserError
from training.batches import fingerprint
from training.batches.dataset import open_dataset
from training.batches.fingerprint import agree_on_data, data_differences, data_fingerprint
from training.batches.sources import open_sources
from training.configuration.keys import TrainConfig
from training.process.world import World

pytestmark = pytest.mark.data_check
SHARDS = 3


@pytest.fixture
def folder(tmp_path):
    return make_dataset(tmp_path / "tokens")


def into_shards(folder: Path, by_hand: bool = False) -> Path:
    """The same tokens in shards, with the meta.json that prepare.py would write."""
    ids = np.fromfile(folder / "train.bin", "<u2")
    (folder / "train.bin").unlink()
    for i, part in enumerate(np.array_split(ids, SHARDS)):
        part.tofile(folder / f"train_{i:03d}.bin")
    edit_json(folder / "meta.json", files={} if by_hand else describe(folder))
    return folder


def describe(folder: Path) -> dict:
    contents = {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}
    return {
        name: {"tokens": len(content) // 2, "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }


def write_meta(folder: Path, meta: dict) -> None:
    (folder / "meta.json").write_text(json.dumps(meta))


def config(folder: Path, **keys) -> TrainConfig:
    return TrainConfig(**{**TINY, "dataset": str(folder), "eval_interval": 1, **keys})


def refusal(folder: Path, **keys) -> str:
    with pytest.raises(UserError) as error:
        open_dataset(config(folder, **keys), scan=True)
    return str(error.value)


def fingerprint_of(folder: Path, **keys) -> dict:
    splits, meta = open_dataset(config(folder, **keys), scan=True)
    return json.loads(json.dumps(data_fingerprint(meta, splits)))  # as a checkpoint keeps it


# --- 21: tokens that are not the model's ---


def test_tokens_declared_as_another_type_are_found(tmp_path):
    wide = make_dataset(tmp_path / "wide", dtype="uint32")
    edit_json(wide / "meta.json", dtype="uint16")
    assert "train.bin holds 40,000 tokens, but meta.json records 20,000" in refusal(wide)
    narrow = make_dataset(tmp_path / "narrow")
    write_meta(narrow, {"dtype": "uint32", "vocab_size": 64})  # by hand: the ids themselves say it
    assert "contains token id" in refusal(narrow)


KINDS = {
    "NumPy": b"\x93NUMPY\x01\x00",
    "zip": b"PK\x03\x04",
    "zstandard": b"\x28\xb5\x2f\xfd",
    "gzip": b"\x1f\x8b\x08\x00",
    "parquet": b"PAR1",
    "a header": np.array([20240520, 1], "<i4").tobytes(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_file_of_another_kind_is_named(folder, kind):
    """Where the vocabulary is large, such bytes would pass for tokens."""
    write_meta(folder, {"dtype": "uint16", "vocab_size": 65_536})
    path = folder / "train.bin"
    path.write_bytes(KINDS[kind] + path.read_bytes())
    message = refusal(folder, vocab_size=65_536)
    assert str(path) in message and kind in message and "not flat token ids" in message


def test_tokens_that_begin_like_another_kind_are_tokens_if_meta_has_their_hash(folder):
    path = folder / "train.bin"
    path.write_bytes(b"PK\x03\x04" + path.read_bytes())
    write_meta(folder, {"dtype": "uint16", "vocab_size": 65_536, "files": describe(folder)})
    assert open_dataset(config(folder, vocab_size=65_536), scan=True)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_training_ends_before_its_first_step(run, dtype, tmp_path, monkeypatch, capfd):
    """No device is looked at, no process group joined: on a GPU the id would be an illegal memory access."""
    monkeypatch.setattr("train.init_world", pytest.fail)
    folder = make_dataset(tmp_path / "tokens", dtype=dtype)
    write_meta(folder, {"dtype": dtype, "vocab_size": 1})
    keys = {**TINY, "vocab_size": 60, "dataset": folder, "out_dir": tmp_path / "out"}
    assert run(write_config(tmp_path / "run.py", **keys)) == 2
    assert "contains token id 63, beyond the model's vocab_size=60" in capfd.readouterr().err


# --- 20: data that are not the checkpoint's ---


def change_content(folder):
    path = folder / "train_001.bin"
    np.fromfile(path, "<u2")[::-1].tofile(path)
    return "other tokens in train_001.bin"


def reorder(folder):
    one, other = folder / "train_000.bin", folder / "train_001.bin"  # of one size
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)
    return "other tokens in train_000.bin and 1 more"


def leave_out(folder):
    (folder / "train_002.bin").unlink()
    return "no train_002.bin"


def add(folder):
    (folder / "train_003.bin").write_bytes((folder / "train_000.bin").read_bytes())
    return "in addition train_003.bin"


CHANGES = [change_content, reorder, leave_out, add]


@pytest.mark.parametrize("by_hand", [False, True], ids=["prepared", "meta by hand"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_tokens_are_named_at_a_resume(folder, change, by_hand):
    """Prepared anew, so that the dataset itself is in order."""
    into_shards(folder, by_hand)
    saved = fingerprint_of(folder)
    wanted = change(folder)
    if not by_hand:
        edit_json(folder / "meta.json", files=describe(folder))
    now = fingerprint_of(folder)
    assert data_differences(saved, now) == [wanted] and saved["sha256"] != now["sha256"]


OTHER = {  # what differs in meta.json -> what is said
    "tokenizer": ({"name": "a", "sha256": "2" * 64}, f"tokenizer a ({'2' * 16}) instead of a ({'1' * 16})"),
    "eot_id": (3, "eot_id 3 instead of 2"),
    "vocab_size": (60, "vocab_size 60 instead of 64"),
}


@pytest.mark.parametrize("field", OTHER)
def test_other_tokenizer_is_named_though_the_tokens_are_the_same(folder, field):
    edit_json(folder / "meta.json", tokenizer={"name": "a", "sha256": "1" * 64}, eot_id=2)
    saved = fingerprint_of(folder)
    value, wanted = OTHER[field]
    edit_json(folder / "meta.json", **{field: value})
    assert data_differences(saved, fingerprint_of(folder)) == [wanted]


def test_characters_of_a_character_tokenizer_count(folder):
    prints = []
    for chars in ("abc", "abd"):
        edit_json(folder / "meta.json", tokenizer={"kind": "char", "name": "char", "chars": chars})
        prints.append(fingerprint_of(folder))
    assert len(data_differences(*prints)) == 1


def test_same_data_elsewhere_or_with_less_written_about_it_is_the_same(folder, tmp_path):
    saved = fingerprint_of(folder)
    assert data_differences(saved, fingerprint_of(make_dataset(tmp_path / "copy"))) == []
    assert fingerprint_of(tmp_path / "copy") == saved
    assert data_differences(saved, fingerprint_of(folder, eval_interval=0)) == [], "val was not opened"
    write_meta(folder, {"dtype": "uint16", "vocab_size": 64})
    assert data_differences(saved, fingerprint_of(folder)) == []


def test_machines_with_different_copies_are_found(folder, monkeypatch):
    saved = fingerprint_of(folder)
    monkeypatch.setattr(fingerprint, "run_fingerprint", lambda sources: {**saved, "eot_id": 5})
    monkeypatch.setattr(fingerprint, "from_rank_0", lambda mine, world: {**saved, "eot_id": 4})
    monkeypatch.setattr(fingerprint, "gather_objects", lambda mine, world: [[], None, mine])
    sources = open_sources(config(folder), scan=True)
    with pytest.raises(UserError, match="that of rank 2 has eot_id 5 instead of 4"):
        agree_on_data(sources, World(2, 0, 4, torch.device("cpu"), 2))


def test_machines_with_equal_copies_exchange_no_list_but_rank_0_s(folder, monkeypatch):
    saved, sources = fingerprint_of(folder), open_sources(config(folder), scan=True)
    monkeypatch.setattr(fingerprint, "from_rank_0", lambda mine, world: saved)
    monkeypatch.setattr(fingerprint, "gather_objects", lambda mine, world: sent.append(mine) or [mine])
    for local_rank, expected in ((0, []), (1, None)):
        sent = []
        assert agree_on_data(sources, World(2, local_rank, 4, torch.device("cpu"), 2)) == saved
        assert sent == [expected]
