"""Saving: what is written is the state at that iteration, whole or not at all, whatever happens meanwhile."""

import errno
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.checkpoint_parts import (
    ALONE,
    change,
    copies,
    in_processes,
    make_config,
    make_ranks,
    make_saver,
    make_state,
    save,
)
from support.faults import saved_steps
from support.helpers import (
    HANG_S,
    TINY,
    checkpoint_tensors,
    largest_file,
    last_run,
    make_dataset,
    run_train,
    write_config,
)

from common.errors import RunError, UserError
from training.checkpoints import saver as saver_module
from training.checkpoints.folder import complete_checkpoints
from training.checkpoints.train_state import Progress
from training.checkpoints.verification import damage
from training.faults.watchdog import Watchdog

pytestmark = pytest.mark.saving


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path / "out")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "out" / "checkpoints"


def equal(ours: dict, theirs: dict) -> bool:
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


# --- what is written ---


@pytest.fixture
def late_writing(monkeypatch):
    """The files are written when this is set."""
    allowed, write_files = threading.Event(), saver_module._write_files
    monkeypatch.setattr(
        saver_module, "_write_files", lambda *args: allowed.wait(HANG_S) and write_files(*args)
    )
    return allowed


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_written_is_the_state_when_the_save_began(tmp_path, late_writing, asynchronous):
    state = make_state(config := make_config(tmp_path / "out", async_checkpoint=asynchronous))
    saver, before = make_saver(config, state), copies(state)
    if not asynchronous:
        late_writing.set()
    saver.begin(Progress(1, 10))
    change(state, seed=2)
    late_writing.set()
    folder = saver.completed(wait=None).final
    assert equal(before, checkpoint_tensors(folder)) and not equal(before, copies(state))


def test_the_loop_waits_for_the_copy_alone(config, monkeypatch):
    """The writing waits for the loop here, so a loop that waited for the writing would wait for ever."""
    goes_on, commit = threading.Event(), saver_module._commit
    monkeypatch.setattr(saver_module, "_commit", lambda *args: (goes_on.wait(HANG_S), commit(*args)))
    saver = make_saver(config, make_state(config))
    saver.prepare()
    saver.begin(Progress(1, 10), waited=1000.0)
    copied = saver.save.blocked_seconds - 1000
    assert saver.completed() is None, "still being written"
    goes_on.set()
    done = saver.completed(wait=None)
    assert 0 < copied < done.seconds < 60
    assert done.blocked_seconds - 1000 == copied
    assert saver.completed() is None, "a save is reported once"


@pytest.mark.gpu
def test_a_gpu_s_state_is_copied_to_page_locked_memory_before_it_changes(config, late_writing):
    """And no GPU memory is taken for it."""
    state = make_state(config, world=replace(ALONE, device=torch.device("cuda", 0)))
    saver = make_saver(config, state)
    saver.prepare()
    assert all(copy.is_pinned() for copy in saver.staging.copies)
    before, allocated = {name: t.cpu() for name, t in state.tensors().items()}, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    saver.begin(Progress(1, 10))
    assert torch.cuda.max_memory_allocated() == allocated
    change(state, seed=2)
    late_writing.set()
    assert equal(before, checkpoint_tensors(saver.completed(wait=None).final))


def test_host_memory_is_taken_once_and_is_one_copy_of_the_parts(config):
    saver = make_saver(config, make_state(config))
    saver.prepare()
    pointers = [copy.data_ptr() for copy in saver.staging.copies]
    for iteration in (1, 2, 3):
        save(saver, iteration)
    assert [copy.data_ptr() for copy in saver.staging.copies] == pointers
    held = saver.staging.copies[0].untyped_storage().nbytes()
    assert saver.bytes <= held < saver.bytes + 64 * len(saver.parts)


def test_without_host_memory_training_waits_and_the_log_says_so(config, monkeypatch, caplog):
    monkeypatch.setattr(saver_module, "free_host_bytes", lambda: 1000)
    state = make_state(config)
    saver = make_saver(config, state)
    saver.prepare()
    assert saver.staging is None and "async_checkpoint=True needs" in caplog.text
    assert equal(copies(state), checkpoint_tensors(save(saver, 1)))


def test_a_save_does_not_make_an_out_dir_again_that_was_removed(config, root):
    saver = make_saver(config, make_state(config))
    root.parent.rmdir()
    with pytest.raises(RunError, match="No such file or directory"):
        save(saver, 1)
    assert not root.parent.exists()


def test_ranks_share_the_writing_of_what_all_of_them_have(config, root):
    savers = make_ranks(config, 2)
    assert in_processes(savers, 1) == [0, 0]
    folder = root / "step-00000001"
    tensors = [f"tensors-0000{rank}-0.safetensors" for rank in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "state.json", *tensors]
    assert damage(folder) == []
    assert equal(copies(savers[0].state), checkpoint_tensors(folder))


def test_a_large_part_is_divided_into_files_of_one_size(config, monkeypatch):
    monkeypatch.setattr(saver_module, "FILE_BYTES", 1000)
    state = make_state(config)
    folder = save(make_saver(config, state), 1)
    sizes = [path.stat().st_size for path in folder.glob("tensors-*")]
    assert len(sizes) == saver_module.WRITER_THREADS and max(sizes) < 2 * min(sizes)
    assert equal(copies(state), checkpoint_tensors(folder))


# --- a kill in each phase ---

PHASES = ("_begin", "_write_files", "_report", "_collect", "_commit", "_rename", "_update_pointers")
OF_EVERY_RANK = ("_write_files", "_report")


def kill_in(phase: str, where: str):
    """Patches this process so that it dies before or after a phase, or in the middle of a file."""
    original = getattr(saver_module, phase)

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def patched(*args):
        if where == "middle":  # in a thread of its own, when the first bytes are on the disk
            saver_module.write_parts = lambda path, parts: (path.write_bytes(b"half"), die())
        if where != "before":
            original(*args)
        die()

    setattr(saver_module, phase, patched)


CASES = [(phase, where, 0) for phase in PHASES for where in ("before", "after")]
CASES += [(phase, "before", 1) for phase in OF_EVERY_RANK] + [("_write_files", "middle", r) for r in (0, 1)]


@pytest.mark.parametrize(("phase", "where", "rank"), CASES)
def test_a_rank_that_is_killed_in_a_save_leaves_a_whole_checkpoint(config, root, phase, where, rank):
    savers = make_ranks(config, 2)
    first = copies(savers[0].state)
    assert in_processes(savers, 1) == [0, 0]
    for saver in savers:
        change(saver.state, seed=2)
    second = copies(savers[0].state)

    statuses = in_processes(savers, 2, lambda r: kill_in(phase, where) if r == rank else None)
    assert statuses[rank] == -signal.SIGKILL
    there = [folder.name for folder in complete_checkpoints(root)]
    committed = phase == "_update_pointers" or (phase, where) == ("_rename", "after")
    assert there == ["step-00000001"] + ["step-00000002"] * committed
    assert all(damage(root / name) == [] for name in there)
    assert equal(second if committed else first, checkpoint_tensors(root / there[-1]))

    # the next start needs no help, and the remains go
    start = 2 if committed else 1
    again = make_ranks(config, 2, seed=3, start=start, run="again")
    assert in_processes(again, 3) == [0, 0]
    assert equal(copies(again[0].state), checkpoint_tensors(root / "step-00000003"))
    assert not list(root.glob("*.tmp*"))
    assert (root / "latest").read_text() == "step-00000003\n"


# --- errors ---


def fail(*args):
    raise OSError(errno.EIO, "the disk is broken")


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_in_any_phase_reaches_the_loop(config, root, monkeypatch, phase):
    saver = make_saver(config, make_state(config))
    save(saver, 1)
    monkeypatch.setattr(saver_module, phase, fail)
    with pytest.raises(RunError, match="could not write the checkpoint .*step-00000002.*the disk is broken"):
        save(saver, 2)
    assert (root / "latest").read_text() == "step-00000001\n"
    assert damage(root / "step-00000001") == []
    assert not list(root.glob("*.tmp*"))


def test_ranks_that_only_hear_of_a_failure_say_so(config, root, monkeypatch):
    """Rank 0 fails and takes the folder away while rank 1 is about to write into it."""
    ranks = make_ranks(config, 2)
    write_files, both_here = saver_module._write_files, threading.Barrier(2, timeout=HANG_S)

    def fail_on_rank_0(save, rank, work):
        both_here.wait()
        if rank == 0:
            fail()
        ranks[0].thread.join()
        return write_files(save, rank, work)

    monkeypatch.setattr(saver_module, "_write_files", fail_on_rank_0)
    for saver in ranks:
        saver.begin(Progress(1, 10))
    with pytest.raises(RunError, match="the disk is broken"):
        ranks[0].completed(wait=None)
    with pytest.raises(RunError, match="rank 0 could not complete it"):
        ranks[1].completed(wait=None)
    assert list(root.iterdir()) == []


def test_a_file_that_does_not_read_back_is_an_error(config, root, monkeypatch):
    write_parts = saver_module.write_parts

    def lossy(path, parts):
        written = write_parts(path, parts)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return written

    monkeypatch.setattr(saver_module, "write_parts", lossy)
    saver = make_saver(config, make_state(config))
    with pytest.raises(RunError, match="tensors-00000-0.safetensors does not read back as it was written"):
        save(saver, 1)
    assert complete_checkpoints(root) == []


def free_bytes(monkeypatch, size: float):
    monkeypatch.setattr(saver_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


def test_a_disk_without_room_is_named_before_the_first_step(config, monkeypatch):
    free_bytes(monkeypatch, 1e3)
    with pytest.raises(UserError, match="no checkpoint could be saved: .* needed .*1e-06 GB are free"):
        make_saver(config, make_state(config)).prepare()


def test_a_disk_that_fills_up_later_is_noticed_before_a_byte_is_written(config, root, monkeypatch):
    saver = make_saver(config, make_state(config))
    save(saver, 1)
    free_bytes(monkeypatch, 1.19 * saver.bytes)
    monkeypatch.setattr(saver_module, "_write_files", lambda *args: pytest.fail("it wrote"))
    with pytest.raises(RunError, match=r"needed on the disk \(1.2 times its size\)"):
        save(saver, 2)
    assert damage(root / "step-00000001") == []


def test_a_checkpoint_of_that_name_is_never_overwritten(config, root):
    saver = make_saver(config, make_state(config))
    kept = (save(saver, 1) / "manifest.json").read_bytes()
    change(saver.state, seed=2)
    with pytest.raises(RunError, match="not empty"):
        save(saver, 1)
    assert (root / "step-00000001" / "manifest.json").read_bytes() == kept


# --- a whole run ---


@pytest.fixture
def run_config(tmp_path):
    keys = {**TINY, "max_iters": 8, "eval_interval": 2, "out_dir": tmp_path / "out"}
    return write_config(tmp_path / "run.py", **keys, dataset=make_dataset(tmp_path / "tokens"))


@pytest.mark.parametrize(("at", "rows"), [(4, 5), (8, 8)], ids=["in the middle", "the last one"])
def test_a_failed_save_ends_the_run_within_an_iteration(run, run_config, root, monkeypatch, capfd, at, rows):
    commit, begin = saver_module._commit, saver_module.Saver.begin

    def fail_once(save, *args):
        (fail if save.progress.iteration == at else commit)(save, *args)

    def begin_and_wait(self, *args):  # so that the failure is there by the next iteration
        begin(self, *args)
        self.thread.join()

    monkeypatch.setattr(saver_module, "_commit", fail_once)
    monkeypatch.setattr(saver_module.Saver, "begin", begin_and_wait)
    assert run(run_config) == 1
    assert f"error: could not write the checkpoint {root}/step-0000000{at}" in capfd.readouterr().err
    record = last_run(root.parent)
    assert record["status"] == "failed" and len(record["training_iterations"]) <= rows
    assert (root / "latest").read_text() == f"step-0000000{at - 2}\n"
    assert [saved["iter"] for saved in record["checkpoints"]] == list(range(2, at, 2))


def test_a_run_that_fails_waits_for_the_checkpoint_under_way(run, run_config, root, monkeypatch):
    commit, fail_at_3 = saver_module._commit, lambda self, iteration: 1 / (3 - iteration)
    monkeypatch.setattr(saver_module, "_commit", lambda *args: (time.sleep(0.5), commit(*args)))
    monkeypatch.setattr("training.faults.stragglers.Stragglers.check", fail_at_3)
    assert run(run_config, "--checkpoint_interval=3", "--eval_interval=0") == 1
    assert saved_steps(root.parent) == [3]
    assert [saved["iter"] for saved in last_run(root.parent)["checkpoints"]] == [3]


def test_checkpoints_come_every_so_many_iterations(run, run_config, root):
    assert run(run_config, "--checkpoint_interval=3", "--eval_interval=0", "--keep_last=9") == 0
    assert saved_steps(root.parent) == [3, 6, 8]
    assert json.loads((root / "step-00000003" / "state.json").read_text())["val_loss"] is None


def test_checkpoints_come_every_so_many_seconds(run, run_config, root, monkeypatch):
    """An iteration is a second by the clock of this test."""
    clock, check = SimpleNamespace(now=0.0), Watchdog.check

    def tick(self, iteration=None, at_once=False):
        clock.now += iteration is not None
        check(self, iteration, at_once)

    monkeypatch.setattr("training.evaluate_and_save.time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(Watchdog, "check", tick)
    flags = ["--checkpoint_interval=4s", "--eval_interval=0", "--max_iters=16", "--keep_last=9"]
    assert run(run_config, *flags) == 0
    assert saved_steps(root.parent) == [4, 9, 14, 16]  # asked for after 4 s, and saved an iteration later


def test_a_full_disk_ends_all_ranks_and_leaves_the_checkpoint_before(run, run_config, root):
    """A limit on the size of files stands in for the disk: the checkpoint's are above it."""
    assert run_train(run_config, "--max_iters=2", processes=2).returncode == 0
    with largest_file(60_000):
        done = run_train(run_config, "--init_from=resume", "--max_iters=6", processes=2)
    assert done.returncode == 1 and "1" in re.findall(r"exitcode  : (-?\d+)", done.stderr)
    assert "could not write the checkpoint" in done.stderr and "File too large" in done.stderr
    assert saved_steps(root.parent) == [2]
    assert damage(root / "step-00000002") == []
    assert run(run_config, "--init_from=resume", "--max_iters=4", "--gradient_accumulation_steps=2") == 0
    assert not list(root.glob("*.tmp*"))
