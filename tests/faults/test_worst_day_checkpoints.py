"""The worst day of a checkpoint: whoever wrote what is read back. The hashes match in every
case: a resume takes the next older checkpoint, or there is one clear message."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoint_parts import (
    ALONE,
    SMALL,
    copy_checkpoint,
    make_config,
    make_saver,
    make_state,
    save,
    sign,
)
from support.hostile_files import DEEP, no_hang, pairs, replace  # noqa: F401 - no_hang is a fixture

import sample
from common.errors import UserError
from training.checkpoints.folder import step_folders
from training.checkpoints.loading import load_checkpoint
from training.checkpoints.resume import choose_start, find_resume
from training.checkpoints.tensor_files import mapped, read_header, write_parts
from training.checkpoints.verification import damage

TENSORS = "tensors-00000-0.safetensors"
WEIGHT = "embed.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("saved") / "out")
    return save(make_saver(config, make_state(config)), 1, val_loss=1.0)


@pytest.fixture
def root(saved, tmp_path):
    """Two checkpoints that are whole: steps 1 and 2."""
    root = tmp_path / "out" / "checkpoints"
    root.mkdir(parents=True)
    shutil.copytree(saved, root / "step-00000001")
    copy_checkpoint(saved, root, 2)
    return root


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(root, monkeypatch):
    """Such as those of another user: init_from='auto' does not begin from scratch beside them."""
    config = make_config(root.parent, init_from="auto")
    assert choose_start(config, ALONE)[0].init_from == "resume"
    for name in ("listdir", "scandir"):
        there = getattr(os, name)

        def refuse(path=".", there=there):
            if Path(path) == root:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return there(path)

        monkeypatch.setattr(os, name, refuse)
    for begin in (choose_start, lambda config, world: find_resume(config, world, {})):
        with pytest.raises(PermissionError, match=str(root)):
            begin(
                make_config(root.parent, init_from="resume" if begin is not choose_start else "auto"), ALONE
            )


def resume(root: Path, **keys):
    return find_resume(make_config(root.parent, init_from="resume", **keys), ALONE, {})


def newest(root: Path) -> Path:
    return root / "step-00000002"


def assert_older_one_is_used(root: Path, problem: str) -> None:
    with pytest.raises(UserError, match="is damaged: "):
        sample.main([f"--out_dir={root.parent}", "--device=cpu"])
    found = resume(root)
    assert found.checkpoint.name == "step-00000001"
    assert problem in found.renamed[0]["problem"] and "Error" not in found.renamed[0]["problem"]
    assert (root / "step-00000002.corrupt").exists()


# --- state.json ---


def edited(path: Path, field: str, value: object) -> None:
    """Sets a field, whose name may lead into other objects; ... removes it."""
    content = json.loads(path.read_text())
    *outer, name = field.split(".")
    target = content
    for key in outer:
        target = target[key]
    target.pop(name, None)
    if value is not ...:
        target[name] = value
    path.write_text(json.dumps(content))


WRONG_FIELDS = {  # of their types (test_changed_files.py), and yet not of a run's checkpoint
    "iteration": [7],
    "val_loss": ["low"],
    "config.batch_size": [{"a": 1}],
    "model_config.colour": ["red"],
    "model_config.n_layer": [10**9, 2],
    "model_config.n_embd": [2**52],
    "model_config.n_head": [3],
    "model_config.head_dim": [10**12],
    "model_config.rope_scaling": [
        *("linear", {"a": {"b": 1}}, {"rope_type": "linear", "factor": 1e300}),
        {"rope_type": "linear", "factor": 2.0, "rope_scaling": {}},
    ],
    "model_config.block_size": [2**40],
    "model_config.vocab_size": [65],
    "data.splits": [{"train": {"train.bin": {"tokens": 1}}}],
    "data.sources": [[7]],
    "tensors": [{"x": "F32 ()"}, {f"optimizer.{WEIGHT}.step": "F32 (1,)"}],
}


@pytest.mark.parametrize(
    ("field", "value"),
    pairs(WRONG_FIELDS),
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_field_of_state_json_is_damage(root, field, value):
    edited(newest(root) / "state.json", field, value)
    sign(newest(root))
    assert_older_one_is_used(root, "")


ENTRY = {"sha256": "0" * 64, "bytes": 1}


@pytest.mark.parametrize("name", ["a\0b", "..", "../state.json", "/etc/x", "a/b", "manifest.json", ""])
def test_a_manifest_that_leads_out_of_its_folder_is_damage(root, name):
    files = {"state.json": ENTRY, name: ENTRY}
    (newest(root) / "manifest.json").write_text(json.dumps({"files": files}))
    assert_older_one_is_used(root, "manifest.json is damaged: a name in files is ")


def test_a_manifest_of_very_many_files_names_the_first_that_are_missing(root):
    folder = newest(root)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] |= {f"f{i:04}": {"sha256": "0" * 64, "bytes": 1} for i in range(1000)}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert damage(folder) == [*(f"f{i:04} is missing" for i in range(10)), "and 990 more"]


@pytest.mark.parametrize("name", ["state.json", TENSORS, "manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
def test_a_special_file_is_damage(root, name, kind):
    replace(newest(root) / name, kind)
    found = resume(root)
    assert found.checkpoint.name == "step-00000001"
    assert name in found.renamed[0]["problem"]


@pytest.mark.parametrize("name", ["step-00000009", "step-\N{SUPERSCRIPT TWO}", "step-" + "9" * 30])
@pytest.mark.parametrize("kind", ["pipe", "file", "dangling link"])
def test_whatever_is_named_like_a_checkpoint_stops_no_resume(root, name, kind, monkeypatch):
    (root / name).touch()
    if kind != "file":
        replace(root / name, kind)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    config = make_config(root.parent, init_from="auto")
    assert choose_start(config, ALONE)[0].init_from == "resume"
    assert resume(root).checkpoint.name == "step-00000002"


def test_checkpoints_are_ordered_by_their_number(tmp_path):
    for name in ("step-100000000", "step-99999999", "step-00000005"):
        (tmp_path / name).mkdir()
    assert [path.name[5:] for path in step_folders(tmp_path)] == ["00000005", "99999999", "100000000"]


# --- tensors ---


def rewrite(folder: Path, change, which=lambda name: True) -> None:
    """Writes the tensors again: change(part, tensor) gives another pair, or None to leave it out."""
    path = folder / TENSORS
    parts = [(part, mapped(part, place).clone()) for part, place in read_header(path).items()]
    path.unlink()
    changed = [change(*pair) if which(pair[0].name) else pair for pair in parts]
    write_parts(path, [pair for pair in changed if pair])
    sign(folder)


def as_integers(part, tensor):
    return part._replace(dtype=torch.int32), tensor.int()


def without_a_row(part, tensor):
    if not part.shape:  # a step becomes a list of one
        return part._replace(shape=(1,), offsets=(0,)), tensor.reshape(1)
    return part._replace(shape=(part.shape[0] - 1, *part.shape[1:])), tensor[1:].clone()


@pytest.mark.parametrize("change", [as_integers, without_a_row, lambda *_: None])
@pytest.mark.parametrize("name", ["model.{}", "optimizer.{}.exp_avg", "optimizer.{}.step"])
def test_a_tensor_that_is_not_of_the_model_is_damage(root, change, name):
    name = name.format(WEIGHT)
    rewrite(newest(root), change, lambda other: other == name)
    assert_older_one_is_used(root, name)


def test_parts_that_overlap_and_leave_a_gap_are_damage(root):
    """Their sizes add up to that of the whole."""
    name, width = f"model.{WEIGHT}", SMALL["n_embd"]
    like = next(part for part in read_header(newest(root) / TENSORS) if part.name == name)
    rewrite(newest(root), lambda *_: None, lambda other: other == name)
    for number, (first, rows) in enumerate(((0, 20), (10, 20), (40, 24))):
        part = like._replace(offsets=(first, 0), shape=(rows, width))
        write_parts(newest(root) / f"tensors-00001-{number}.safetensors", [(part, torch.ones(rows, width))])
    sign(newest(root))
    assert_older_one_is_used(root, f"the parts of {name} do not make")


def test_random_generators_that_are_none_are_one_message(root):
    noise = lambda part, tensor: (part, torch.full_like(tensor, 255))  # noqa: E731
    rewrite(newest(root), noise, lambda name: name.startswith("rng."))
    with pytest.raises(UserError, match="random generators in the checkpoint are refused"):
        load_checkpoint(newest(root), make_state(make_config(root.parent)))
