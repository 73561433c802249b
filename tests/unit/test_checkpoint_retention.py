"""Which checkpoints stay: never fewer valid ones than asked for, whatever else lies in the folder."""

import os
from pathlib import Path

import pytest
from support.checkpoint_parts import copy_checkpoint, make_config, make_saver, make_state, save

from training.checkpoints import retention
from training.checkpoints.folder import delete, delete_remains, step_folders
from training.checkpoints.retention import Retention
from training.checkpoints.verification import damage

pytestmark = pytest.mark.retention


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "out" / "checkpoints"
    root.mkdir(parents=True)
    return root


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("template"))
    return save(make_saver(config, make_state(config)), 1)


@pytest.fixture
def make(template):
    """make(root, step, val_loss): a checkpoint."""
    return lambda root, step, val_loss=None: copy_checkpoint(template, root, step, val_loss=val_loss)


def flip(folder: Path) -> Path:
    """Of the same size, and found only by its hash."""
    path = folder / "state.json"
    path.write_text(path.read_text().replace("1337", "1338"))
    return folder


def steps(root: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in step_folders(root)]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_valid_ones_and_the_best_stay(make, root, keep):
    """After each save there are `keep` that verify, as soon as there have been so many."""
    keeper = Retention(keep)
    for step in range(1, 13):
        folder = make(root, step, 1.0 if step == 3 else 2.0 + step)  # 3 is the best
        if step in (5, 8, 9):
            flip(folder)
        if step in (7, 10):
            (folder / ("state.json" if step == 7 else "manifest.json")).unlink()
        if (folder / "manifest.json").exists():
            keeper.after_save(root)
        valid = [s for s in steps(root) if damage(root / f"step-{s:08d}") == []]
        made_well = [s for s in range(1, step + 1) if s not in (5, 7, 8, 9, 10)]
        assert set(made_well[-keep:]) <= set(valid), (step, valid)
        best = 3 if step >= 3 else 1
        assert set(valid) <= {*made_well[-keep:], best}, (step, valid)
    assert (root / "best").read_text() == "step-00000003\n"
    assert (root / "latest").read_text() == "step-00000012\n"


def test_a_best_one_that_is_damaged_gives_way_to_the_next(make, root, caplog):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0), (5, 5.0)):
        make(root, step, loss)
    flip(root / "step-00000002")
    Retention(1).after_save(root)
    assert (root / "best").read_text() == "step-00000003\n"
    assert steps(root) == [3, 5]
    assert "step-00000002 is damaged and does not count: state.json does not match its sha256" in caplog.text


def test_damage_that_comes_later_is_seen_before_the_next_deletion(make, root):
    keeper = Retention(2)
    for step in (1, 2):
        keeper.trust(make(root, step))
    flip(root / "step-00000002")
    make(root, 3)
    keeper.after_save(root)
    assert steps(root) == [1, 2, 3], "1 and 3 are the two newest that verify"


def test_a_checkpoint_is_read_once_as_long_as_its_files_do_not_change(make, root, monkeypatch):
    read = []
    monkeypatch.setattr(retention, "damage", lambda folder: read.append(folder.name) or [])
    keeper = Retention(2)
    for step in (1, 2, 3, 4):
        make(root, step, val_loss=5.0 - step)
        keeper.after_save(root)
    assert sorted(read) == [f"step-{step:08d}" for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("keep_all", [True, False])
def test_what_was_verified_is_forgotten_with_its_checkpoint(make, root, keep_all):
    keeper = Retention(None if keep_all else 2)
    for step in range(1, 7):
        keeper.trust(make(root, step, val_loss=9.0 - step))
        if keep_all and step > 2:  # as a user does; by itself it deletes none
            delete(step_folders(root)[0])
        keeper.after_save(root)
    assert sorted(keeper.seen) == step_folders(root) and steps(root) == [5, 6]


def test_what_cannot_be_deleted_is_a_warning_and_the_others_go(make, root, monkeypatch, caplog):
    for step in (1, 2, 3, 4):
        make(root, step)
    rename = os.rename

    def read_only(source, target):
        if "step-00000001" in str(source):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", read_only)
    Retention(1).after_save(root)
    assert steps(root) == [1, 4]
    assert "could not delete" in caplog.text and "step-00000001" in caplog.text


def test_no_link_is_followed_and_nothing_outside_is_touched(make, root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    elsewhere = make(outside, 1)
    (outside / "file").write_text("mine")
    (root / "step-00000001").symlink_to(elsewhere)
    (root / "step-00000009.tmp-x").symlink_to(outside)
    inside = make(root, 2)
    (inside / "link").symlink_to(outside)
    for step in (3, 4):
        make(root, step)
    delete_remains(root)
    Retention(1).after_save(root)
    assert steps(root) == [1, 4], "the link stays, the folder with a link in it is gone"
    assert (outside / "file").read_text() == "mine" and damage(elsewhere) == []
    delete(root / "step-00000001")
    assert (root / "step-00000001").is_symlink()


def test_remains_of_killed_saves_and_deletions_go_and_nothing_else(root):
    remains, others = ("1.tmp-a-0", "2.tmp-delete-b"), ("3", "4.corrupt")
    for name in (*remains, *others):
        (root / f"step-0000000{name}").mkdir()
        (root / f"step-0000000{name}" / "file").write_text("x")
    delete_remains(root)
    assert sorted(path.name for path in root.iterdir()) == [f"step-0000000{name}" for name in others]
