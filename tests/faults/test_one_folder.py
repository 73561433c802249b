"""What prepare() promises of one folder: two preparations exclude each other, a dataset of one part is
train.bin and val.bin, and a stop at any step is repaired."""

import contextlib
import os
from pathlib import Path

import pytest
from support.helpers import make_dataset
from support.preparation import write_small
from support.three_parts import config, contents, make

import data.inspect.__main__ as inspect
from common.errors import UserError
from data.pipeline.folder_lock import only_preparation
from data.pipeline.meta_file import read_meta
from training.batches.dataset import open_dataset

# --- two preparations in one folder ---


def test_every_way_to_make_a_dataset_is_refused_while_another_runs(tmp_path, bpe, here):
    folder = make_dataset(tmp_path / "tokens", vocab_size=257)
    (folder / "meta.json").unlink()
    before = contents(folder)
    with only_preparation(folder):
        for call in (
            lambda: make(folder, bpe),
            lambda: make(folder, bpe, resume=False),
            lambda: write_small(folder),
        ):
            with pytest.raises(UserError, match="another preparation is at work in"):
                call()
        assert contents(folder) == before
    make(folder, bpe, resume=False)


def test_small_dataset_does_not_mix_with_another_preparation(tmp_path, bpe, here):
    make(tmp_path, bpe)
    with pytest.raises(UserError, match="holds a dataset made otherwise"):
        write_small(tmp_path)


# --- a dataset of one part is train.bin and val.bin ---


def test_a_dataset_of_one_part_is_train_bin_and_val_bin(tmp_path, bpe, here):
    several = make(tmp_path / "several", bpe)["files"]
    assert "train_000001.bin" in several and len(several) > 4
    assert list(make(tmp_path / "out", bpe, None)["files"]) == ["train.bin", "val.bin"]
    for split in ("train", "val"):
        names = sorted(name for name in several if name.startswith(split))
        parts = b"".join((tmp_path / "several" / name).read_bytes() for name in names)
        assert (tmp_path / "out" / f"{split}.bin").read_bytes() == parts
    assert len(list((tmp_path / "out").glob("*.bin"))) == 2
    inspect.check_files(tmp_path / "out", read_meta(tmp_path / "out"), hashes=True)
    open_dataset(config(tmp_path / "out", vocab_size=257, block_size=8), scan=True)


def test_finished_dataset_is_not_made_again(tmp_path, bpe, here, monkeypatch):
    meta = make(tmp_path / "out", bpe, None)
    before = contents(tmp_path / "out")
    monkeypatch.setattr("data.pipeline.preparation.run_parts", None)  # none is missing
    assert make(tmp_path / "out", bpe, None) == meta and contents(tmp_path / "out") == before
    assert set(before) == {
        *("train.bin", "val.bin", "meta.json", "meta.pkl", "tokenizer.json", "plan.json"),
        "parts/000000.json",
    }


STEPS = {"replace": os, "unlink": Path, "fsync": os}


@pytest.mark.parametrize("part_bytes", [1, None])
@pytest.mark.parametrize("step", STEPS)
def test_stop_at_any_step_is_repaired_by_the_same_command(tmp_path, bpe, here, monkeypatch, step, part_bytes):
    options = (bpe, part_bytes, 30)  # of several files
    make(tmp_path / "wanted", *options)
    wanted = contents(tmp_path / "wanted")
    failing, stopped = 0, True
    while stopped:
        failing, folder = failing + 1, tmp_path / f"{failing}"
        stopped = stop_at(monkeypatch, step, failing, lambda folder=folder: make(folder, *options))
        assert failing < 100
        if stopped and (folder / "meta.json").exists():  # complete, or not there
            inspect.check_files(folder, read_meta(folder), hashes=True)
        make(folder, *options)
        assert contents(folder) == wanted, failing
    assert failing > 5


class Killed(BaseException):
    """As SIGKILL: nothing after it runs, also no clean-up."""


def stop_at(monkeypatch, step: str, failing: int, call) -> bool:
    """Whether `call` got as far as the `failing`-th use of this function; after it, nothing is written."""
    uses = []

    def counted(name, real):
        def use(*arguments, **keys):
            uses.append(name)
            if uses.count(step) >= failing:
                raise Killed
            return real(*arguments, **keys)

        return use

    with monkeypatch.context() as patch:
        for name, owner in STEPS.items():
            patch.setattr(owner, name, counted(name, getattr(owner, name)))
        with contextlib.suppress(Killed):
            call()
            return False
    return True


def test_damaged_train_bin_is_made_again(tmp_path, bpe, here):
    def flip(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])

    make(tmp_path / "out", bpe, None)
    wanted = contents(tmp_path / "out")
    flip(tmp_path / "out" / "train.bin")
    (tmp_path / "out" / "train_007.bin").write_bytes(b"ab")  # of a killed process that read other text
    make(tmp_path / "out", bpe, None)
    assert contents(tmp_path / "out") == wanted
