"""Going on: the newest checkpoint that can be trusted, bit for bit, and never as another run in
silence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoint_parts import ALONE, make_config, make_saver, make_state, save
from support.helpers import TINY, checkpoint_tensors, last_run, make_dataset, run_train, write_config

from common.errors import UserError
from training.checkpoints.folder import find_checkpoint, step_folders
from training.checkpoints.resume import find_resume
from training.configuration.files_and_flags import load_config
from training.optimization.schedule import learning_rate

pytestmark = pytest.mark.resume

# --- which one ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three checkpoints, of which step 2 is the best."""
    config = make_config(tmp_path_factory.mktemp("trained") / "out", keep_last=None)
    saver = make_saver(config, make_state(config))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(saver, step, loss)
    return Path(config.out_dir)


@pytest.fixture
def out_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "out")


def resume(out_dir: Path, **keys):
    return find_resume(make_config(out_dir, init_from="resume", **keys), ALONE, {})


def break_file(out_dir: Path, step: int) -> Path:
    path = next((out_dir / "checkpoints" / f"step-{step:08d}").glob("tensors-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


def test_pointers_are_not_trusted(out_dir):
    """A kill may have left them behind, and whoever writes them must not lead a run out of its folder."""
    root = out_dir / "checkpoints"
    (root / "latest").write_text("../../elsewhere\n")
    (root / "best").unlink()
    (root / "best").symlink_to("/etc/passwd")
    assert resume(out_dir).checkpoint == root / "step-00000003"
    assert find_checkpoint(out_dir, "best") == root / "step-00000002"
    with pytest.raises(UserError, match="holds no checkpoint '../elsewhere'"):
        find_checkpoint(out_dir, "../elsewhere")


@pytest.mark.damage
def test_a_damaged_one_is_set_aside_named_and_the_next_older_used(out_dir, caplog):
    path = break_file(out_dir, 3)
    found = resume(out_dir)
    assert found.checkpoint.name == "step-00000002"
    assert [item["problem"] for item in found.renamed] == [f"{path.name} does not match its sha256"]
    renamed = out_dir / "checkpoints" / "step-00000003.corrupt"
    assert found.renamed[0]["renamed"] == str(renamed) and renamed.is_dir() and not path.exists()
    assert f"{path.name} does not match its sha256. It is now step-00000003.corrupt" in caplog.text
    assert resume(out_dir).renamed == [], "it is not found again"


def test_what_only_another_rank_finds_damaged_is_not_set_aside(out_dir, monkeypatch):
    """Its machine may not see the disk, or not yet."""
    damage = "training.checkpoints.resume.damage"
    monkeypatch.setattr(damage, lambda folder, *world: ["state.json is missing"] if world else [])
    with pytest.raises(
        UserError, match="rank 0 finds .*step-00000003 whole, another rank does not: state.json"
    ):
        resume(out_dir)
    assert len(step_folders(out_dir / "checkpoints")) == 3


def test_an_evaluation_renames_nothing(out_dir):
    """It holds no lock: the run that saves there may be alive."""
    path = break_file(out_dir, 3)
    assert resume(out_dir, eval_only=True).checkpoint.name == "step-00000002" and path.exists()


@pytest.mark.damage
def test_a_folder_without_a_manifest_is_a_damaged_one(out_dir):
    (out_dir / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    (out_dir / "checkpoints" / "step-00000009").mkdir()
    found = resume(out_dir)
    assert found.checkpoint.name == "step-00000002" and len(found.renamed) == 2


@pytest.mark.damage
def test_without_one_that_can_be_trusted_nothing_starts_and_nothing_is_renamed(out_dir):
    paths = [break_file(out_dir, step) for step in (1, 2, 3)]
    for _ in range(2):  # the second time, too
        with pytest.raises(
            UserError, match="(?s)none of the checkpoints can be trusted.*--init_from=scratch"
        ) as error:
            resume(out_dir)
        assert all(str(path.parent) in str(error.value) and path.name in str(error.value) for path in paths)
    assert len(step_folders(out_dir / "checkpoints")) == 3


def test_no_checkpoint_at_all_is_an_error(tmp_path):
    with pytest.raises(UserError, match="holds no complete checkpoint to resume"):
        resume(tmp_path / "absent")


@pytest.mark.parametrize(("which", "step"), [("best", 2), ("step-00000001", 1)])
def test_one_that_is_named_is_taken_or_it_is_an_error(out_dir, which, step):
    assert resume(out_dir, resume_from=which).checkpoint.name == f"step-{step:08d}"
    path = break_file(out_dir, step)
    with pytest.raises(UserError, match=f"step-{step:08d} is damaged: {path.name} does not match"):
        resume(out_dir, resume_from=which)
    assert path.exists(), "a checkpoint that was named is not renamed"


@pytest.mark.parametrize("which", ["step-00000007", "newest", "step-1", "../../victim", "/etc/hostname"])
def test_one_that_is_named_and_missing_is_an_error(out_dir, which):
    with pytest.raises(UserError, match=f"holds no checkpoint '{which}'; there are latest, best, step-"):
        resume(out_dir, resume_from=which)


# --- with which settings ---


SCALING = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 64}
SHAPES = {"block_size": 32, "head_dim": 12, "qkv_bias": True, "rope_scaling": SCALING}


def prepare(folder: Path) -> Path:
    """A dataset and the settings of a run in this folder."""
    make_dataset(folder / "tokens")
    keys = {**TINY, **SHAPES, "max_iters": 4, "eval_interval": 2, "dropout": 0.1}
    write_config(folder / "run.py", **keys, dataset=folder / "tokens", out_dir=folder / "out")
    return folder


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("begun"))
    done = run_train(folder / "run.py")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def begun(begun_once, tmp_path):
    """A folder with a run in it that has made 4 iterations."""
    shutil.copytree(begun_once / "out", prepare(tmp_path) / "out")
    return tmp_path


RESUME = ("--init_from=resume", "--max_iters=6")


@pytest.mark.damage
def test_a_damaged_one_is_in_log_and_record(run, begun, capfd):
    path = break_file(begun / "out", 4)
    assert run(begun / "run.py", *RESUME) == 0
    said, renamed = capfd.readouterr().out, path.parent.with_name("step-00000004.corrupt")
    assert f"step-00000004 is damaged: {path.name} does" in said and "Resuming from" in said
    info = last_run(begun / "out")["startup_info"]
    assert info["checkpoints_set_aside"][0]["renamed"] == str(renamed)
    assert info["resumed_from"].endswith("step-00000002")


@pytest.mark.data_check
def test_every_change_is_named_at_once_and_the_flag_allows_them(run, begun, capfd):
    changes = ["--seed=7", "--weight_decay=0.2"]
    assert run(begun / "run.py", *RESUME, *changes) == 2
    message = capfd.readouterr().err
    assert "seed: checkpoint 1337, now 7; weight_decay: checkpoint 0.1, now 0.2" in message
    flag = "--allow_changes=seed,weight_decay"
    assert flag in message
    assert run(begun / "run.py", *RESUME, *changes, "--allow_changes=seed") == 2
    assert run(begun / "run.py", *RESUME, *changes, flag) == 0
    assert "allow_changes: seed was 1337 in the checkpoint, is 7 now" in capfd.readouterr().out
    record = last_run(begun / "out")
    assert record["config"]["allow_changes"] == "seed,weight_decay"
    assert record["startup_info"]["changed_since_checkpoint"]["weight_decay"] == [0.1, 0.2]


def test_more_iterations_another_log_interval_or_another_place_or_spelling_are_no_change(run, begun):
    shutil.copytree(begun / "tokens", begun / "moved")
    spelled = f"--rope_scaling={json.dumps({**SCALING, 'factor': 8.0})}"  # as a user types it in quotes
    assert run(begun / "run.py", *RESUME, "--log_interval=2", f"--dataset={begun / 'moved'}", spelled) == 0
    record = last_run(begun / "out")
    rates = [row["lr"] for row in record["training_iterations"] if row["iter"] >= 4]
    config = load_config([str(begun / "run.py")])
    assert rates == [learning_rate(iteration, config) for iteration in (4, 5)]
    assert "rope_scaling" not in record["startup_info"]["changed_since_checkpoint"]
    architecture = record["startup_info"]["model"]["architecture"]
    assert {name: architecture[name] for name in SHAPES} == SHAPES
    assert record["config"]["rope_scaling"] == SCALING


@pytest.mark.data_check
def test_other_data_under_the_same_name_is_refused(run, begun, capfd):
    make_dataset(begun / "tokens", seed=1)
    assert run(begun / "run.py", *RESUME) == 2
    message = capfd.readouterr().err
    assert (
        "dataset: checkpoint" in message and "train.bin" in message and "--allow_changes=dataset" in message
    )
    assert run(begun / "run.py", *RESUME, "--allow_changes=dataset") == 0


# --- bit for bit ---


def test_three_resumes_in_one_run_change_no_bit(run, tmp_path):
    """At 7, at 8 and at 25, with dropout and accumulation; 125 windows are an epoch, an iteration takes 8, so
    7 and 8 are within the first epoch, and the second begins between 8 and 25."""
    folder = prepare(tmp_path)
    make_dataset(folder / "tokens", train_tokens=125 * 32 + 1)
    flags = [folder / "run.py", "--gradient_accumulation_steps=2", "--eval_interval=0"]
    assert run(*flags, "--max_iters=30", f"--out_dir={folder / 'whole'}") == 0
    losses = []
    for start, stop in ((0, 7), (7, 8), (8, 25), (25, 30)):
        begin = ["--init_from=resume"] if start else []
        assert run(*flags, *begin, f"--max_iters={stop}") == 0
        rows = last_run(folder / "out")["training_iterations"]
        losses += [row["loss"] for row in rows if start <= row["iter"] < stop]
    whole = folder / "whole"
    assert losses == [row["loss"] for row in last_run(whole)["training_iterations"]]
    ours, theirs = (path / "checkpoints" / "step-00000030" for path in (folder / "out", whole))
    assert (read := checkpoint_tensors(ours)).keys() == (wanted := checkpoint_tensors(theirs)).keys()
    assert [name for name in read if not torch.equal(read[name], wanted[name])] == []
    seen = [json.loads((path / "state.json").read_text())["samples_seen"] for path in (ours, theirs)]
    assert seen == [240, 240]


def test_a_run_goes_back_to_a_checkpoint_that_is_named(run, begun):
    back = ["--init_from=resume", "--resume_from=step-00000002", "--eval_interval=0"]
    assert run(begun / "run.py", *back) == 0
    record = last_run(begun / "out")
    assert record["startup_info"]["resumed_from"].endswith("step-00000002")
    assert [folder.name for folder in step_folders(begun / "out" / "checkpoints")] == [
        "step-00000002",
        "step-00000004",
    ]
    assert (begun / "out/checkpoints/step-00000004.before").is_dir()
