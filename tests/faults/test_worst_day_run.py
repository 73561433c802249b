"""The worst day of a run: an out_dir that is removed under it, a checkpoint that is deleted while it is read,
a disk that fills up unnoticed, a terminal that is gone."""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoint_parts import copy_checkpoint, make_config, make_saver, make_state, save
from support.faults import saved_steps
from support.helpers import HANG_S, ROOT, largest_file, last_run, start_train

import sample
from common.errors import UserError
from training.checkpoints import loading, resume, saver, verification
from training.checkpoints.folder import delete, step_folders
from training.checkpoints.plan import checkpoint_bytes, plan_saves
from training.configuration.files_and_flags import load_config
from training.process.run_lock import RunLock, check_writable
from training.records.report import _checkpoints
from training.records.run_record import RunRecord

# --- A.7: what others do meanwhile ---


def deleted_before(monkeypatch, module, name: str) -> None:
    """The folder that is this function's first argument is gone once it is called."""
    original = getattr(module, name)
    monkeypatch.setattr(module, name, lambda folder, *a, **k: (delete(folder), original(folder, *a, **k))[1])


@pytest.mark.parametrize("moment", [(verification, "_problem"), (loading, "open_tensors")], ids=str)
@pytest.mark.parametrize("which", ["latest", "step-00000004"])
def test_a_checkpoint_that_is_deleted_while_sample_reads_it_is_named(trained, monkeypatch, moment, which):
    """While it is hashed, or before its tensors are read."""
    deleted_before(monkeypatch, *moment)
    with pytest.raises(UserError, match="step-00000004 was deleted while it was read: start again"):
        sample.main([f"--out_dir={trained}", f"--checkpoint={which}", "--device=cpu", "--prompt=AB"])


def test_an_evaluation_uses_an_older_one_or_says_it_if_the_run_deletes_what_it_reads(
    run, config, out, monkeypatch, capfd
):
    assert run(config) == 0
    evaluates = [config, "--init_from=resume", "--eval_only=True"]
    with monkeypatch.context() as patch:
        deleted_before(patch, resume, "load_checkpoint")
        assert run(*evaluates) == 2
    assert "step-00000004 was deleted while it was read" in capfd.readouterr().err
    assert run(*evaluates) == 0
    (path,) = out.glob("eval_*.json")
    used = json.loads(path.read_text())["startup_info"]["resumed_from"]
    assert used == str(out / "checkpoints" / "step-00000002")


WHEN = {  # the out_dir is removed -> flags
    "row": ["--eval_interval=0", "--checkpoint_interval=1h"],
    "evaluation": ["--log_interval=99", "--checkpoint_interval=1h"],
    "save": ["--eval_interval=0", "--checkpoint_interval=2", "--log_interval=99"],
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("replaced", [False, True])
def test_an_out_dir_that_is_removed_ends_the_run(run, config, out, monkeypatch, capfd, when, replaced):
    """At the next row, evaluation or checkpoint. Nothing is written to a folder that has its name."""
    write, more = saver._write_files, []

    def remove_and_write(*arguments):
        shutil.rmtree(out)
        out.mkdir()
        return write(*arguments)

    if when == "save":
        monkeypatch.setattr(saver, "_write_files", remove_and_write)
        more = [f"--async_checkpoint={replaced}"]
    else:
        remove_in_iteration(3, monkeypatch, out, replaced)
    assert run(config, *WHEN[when], *more, "--max_iters=100") == 1
    error = capfd.readouterr().err
    assert error.count("error: ") == 1 and "Traceback" not in error
    assert f"error: out_dir='{out}' was removed or replaced while this run used it" in error
    assert sorted(path.name for path in out.glob("*")) == ["run.lock"] * (replaced and when != "save")


@pytest.mark.chaos
def test_an_out_dir_that_is_removed_ends_all_ranks(config, out):
    process = start_train(config, "--max_iters=1000000", "--eval_interval=0", processes=2)
    try:
        while "Iter      9" not in process.stdout.readline():
            assert process.poll() is None
        shutil.rmtree(out)
        _, error = process.communicate(timeout=HANG_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1 and not out.exists()
    assert f"error: out_dir='{out}' was removed or replaced" in error, error[-3000:]
    assert 'train.py", line' not in error, error


def remove_in_iteration(number: int, monkeypatch, out: Path, replaced: bool) -> None:
    def check(self, iteration):
        if iteration == number:
            gone = out.rename(out.with_name("gone"))
            shutil.rmtree(gone, ignore_errors=True)  # a save may be writing there
            if replaced:  # as by another run
                out.mkdir()
                (out / "run.lock").touch()

    monkeypatch.setattr("training.faults.stragglers.Stragglers.check", check)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
@pytest.mark.parametrize("flags", [[], ["--init_from=resume"], ["--init_from=auto"]], ids=str)
def test_checkpoints_that_is_no_folder_is_found_at_the_start(run, config, out, capfd, kind, flags):
    out.mkdir()
    root = out / "checkpoints"
    root.touch() if kind == "file" else root.symlink_to("nowhere")
    assert run(config, *flags) == 2
    printed = capfd.readouterr()
    assert f"remove it: rm {root}" in printed.err and "STARTING" not in printed.out
    subprocess.run(shlex.split(re.search(r"remove it: (rm \S+),", printed.err)[1]), check=True)
    assert run(config) == 0


# --- B.6: how much is saved ---


SAVES_NONE = "--always_save_checkpoint=False"
PLANS = [
    *("", "--eval_interval=3", "--eval_interval=0", f"--eval_interval=0 {SAVES_NONE}"),
    "--eval_interval=0 --checkpoint_interval=4",
    f"--eval_interval=3 --checkpoint_interval=4 {SAVES_NONE}",
    f"--eval_interval=7 {SAVES_NONE}",
    f"--eval_interval=7 {SAVES_NONE} --checkpoint_interval=0",
]


@pytest.mark.parametrize("flags", PLANS)
def test_what_is_said_before_a_run_is_what_it_saves(run, config, out, flags):
    """The loss always falls, so each evaluation is a new best."""
    flags = [*flags.split(), "--max_iters=12", "--learning_rate=1e-3", "--min_lr=1e-3"]
    settings = load_config([str(config), *flags])
    plan = plan_saves(settings, 0)
    assert run(config, *flags, "--keep_last=None") == 0
    made = step_folders(out / "checkpoints")
    assert len(made) == plan.most
    if made:
        assert plan_saves(settings, int(made[0].name[5:])).most == plan.most - 1, "after a resume"
        size = sum(path.stat().st_size for path in made[0].iterdir())
        parameters = last_run(out)["startup_info"]["model"]["total_params"]
        assert 0 < size - checkpoint_bytes(parameters, settings) < 30_000


def test_a_smoke_test_of_2_billion_parameters_says_what_it_will_leave_and_how_to_leave_nothing():
    def lines(*flags):
        config = load_config([str(ROOT / "config/full_llama3_2.2b_chinchilla.py"), *flags])
        return dict(_checkpoints(config, {"model": {"total_params": 2_224_154_624}}, 0))

    said = lines("--max_iters=10")
    assert said["Checkpoints"].startswith("1, ") and said["Checkpoints"].endswith("at the end")
    assert said["  size"] == "26.7 GB each; at most 1 on disk at a time: 26.7 GB"
    assert lines("--max_iters=10", *said["  to save none"].split()) == {"Checkpoints": "none"}
    said = lines("--max_iters=1000", "--eval_interval=100", "--checkpoint_interval=50")
    assert said["Checkpoints"].startswith("20, every 50 iterations; at each evaluation, every 100 iterations")
    assert said["  size"].endswith("at most 4 on disk at a time: 107 GB")
    assert lines(*said["  to save none"].split())["Checkpoints"] == "none"
    said = lines("--max_iters=1000", "--eval_interval=100", "--always_save_checkpoint=False")
    assert "up to 10, at each evaluation" in said["Checkpoints"] and "new best" in said["Checkpoints"]
    assert lines("--eval_only=True", "--init_from=resume") == {"Checkpoints": "none"}


def test_one_set_of_older_checkpoints_is_set_aside_and_the_second_is_refused(run, config, out, capfd):
    assert run(config) == 0
    capfd.readouterr()
    assert run(config, "--seed=2") == 0
    root = f"{out}/checkpoints"
    said = f"are now step-N.before in {root}\n  to delete them: rm -r {root}/step-*.before*\n"
    assert said in capfd.readouterr().out
    before = set(out.glob("checkpoints/*/*"))
    assert saved_steps(out) == [2, 4] and len(before) == 4 * 3
    assert run(config, "--seed=3") == run(config, "--seed=3", "--checkpoint_interval=1h") == 2
    printed = capfd.readouterr()
    assert "one such set is kept" in printed.err and "STARTING" not in printed.out
    assert set(out.glob("checkpoints/*/*")) == before
    assert run(config, "--seed=3", "--eval_interval=0", "--always_save_checkpoint=False") == 0, "saves none"
    assert run(config, "--seed=2", "--init_from=resume", "--max_iters=6") == 0, "sets none aside"
    subprocess.run(re.search(r"(rm -r [^;]+);", printed.err)[1], shell=True, check=True)
    assert run(config, "--seed=3") == 0
    assert saved_steps(out) == [2, 4] and len(list(out.glob("checkpoints/*.before"))) >= 2


def test_a_kill_at_any_renaming_loses_none_and_the_same_command_goes_on(out, tmp_path, monkeypatch):
    """A run that goes back to step 1, and is killed at its first renaming, its second and so on."""
    config, root = make_config(out, async_checkpoint=False), out / "checkpoints"
    template = save(make_saver(make_config(tmp_path), make_state(make_config(tmp_path))), 1)
    for step in (1, 2, 3, 4):
        copy_checkpoint(template, root, step, val_loss=float(step))
    rename, left = os.rename, 0  # renamings before the kill

    def killed(source, target):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    for number, there in enumerate(([1, 2, 3, 4], [1, 3, 4], [1], [1, 2])):
        left = number
        with contextlib.suppress(KeyboardInterrupt):
            save(make_saver(config, make_state(config), start=1), 2)
        assert saved_steps(out) == there
    monkeypatch.undo()
    assert sorted(path.name for path in root.glob("*.before")) == [
        f"step-0000000{n}.before" for n in (2, 3, 4)
    ]
    assert all(json.loads((path / "manifest.json").read_text())["files"] for path in root.glob("step-*"))


# --- a full disk, a dead terminal ---


def test_a_disk_that_is_full_at_the_start_is_one_message(out, monkeypatch):
    """Not a traceback when the lock is closed."""

    def fails(path):
        raise OSError(errno.EIO, "I/O error")

    out.mkdir()
    lock = RunLock(out)
    assert not lock.is_lost(), "an evaluation and the other ranks hold none"
    with largest_file(0):
        with pytest.raises(UserError, match="cannot be written: .*File too large"), lock:
            lock.acquire()
        with pytest.raises(UserError, match="cannot be written: .*File too large"):
            check_writable(out)
    with lock:
        lock.acquire()
        assert not lock.is_lost()
        monkeypatch.setattr(Path, "lstat", fails)
        assert not lock.is_lost(), "a disk that does not answer loses no lock"


@pytest.mark.parametrize("method", ["update", "set_postfix_str", "close"])
def test_a_terminal_that_is_gone_ends_no_run_and_costs_no_record(run, config, out, monkeypatch, method):
    """At the progress bar's first line, or at its last, which comes when the record is complete."""
    order, finish = [], RunRecord.close

    def fail(*_, **__):
        order.append(method)
        raise OSError(errno.EIO, "Input/output error")

    bar = dict.fromkeys(("update", "set_postfix_str", "close"), lambda *_, **__: None) | {method: fail}
    monkeypatch.setattr("training.records.rows.tqdm", lambda **_: SimpleNamespace(disable=False, **bar))
    monkeypatch.setattr(RunRecord, "close", lambda self, *a: (order.append("record"), finish(self, *a)))
    assert run(config) == 0
    assert last_run(out)["status"] == "completed"
    assert method in order and order.index("record") < len(order) - (method == "close")
