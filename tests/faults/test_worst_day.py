"""The worst day: a full disk, a dead reader, a stopped launcher. A run must end, and say why if anything can
still be written."""

import contextlib
import errno
import io
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import warm_python
from support.helpers import (
    HANG_S,
    ROOT,
    TINY,
    largest_file,
    last_run,
    make_dataset,
    start_train,
    write_config,
)

import train
from common.errors import RunError, UserError
from training.configuration.files_and_flags import load_config
from training.faults import liveness as liveness_module
from training.faults.liveness import Liveness
from training.faults.watchdog import Watchdog
from training.process import exit_status, launch

FOR_EVER = "--max_iters=100000000", "--log_interval=1000000"
AT_ONCE = "--timeout_minutes=1e-9"


class Left(BaseException):
    """Instead of the end of the process that runs the tests."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worst_day")
    return write_config(folder / "run.py", **TINY | {"dataset": make_dataset(folder / "tokens")})


@pytest.fixture
def left(monkeypatch):
    """The exit statuses with which the process would have ended."""
    statuses = []

    def leave(status):
        statuses.append(status)
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    return statuses


class OnFullDisk(io.TextIOBase):
    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Unread(io.TextIOBase):
    """A pipe that is full, and whose reader reads no more."""

    def __init__(self):
        self.over = threading.Event()

    def write(self, text):
        self.over.wait()

    def flush(self):
        self.over.wait()

    def close(self):
        self.over.set()
        super().close()


@pytest.fixture
def broken(request, monkeypatch):
    """A stream of the parametrized class, for contextlib.redirect_stderr."""
    monkeypatch.setattr(exit_status, "WRITE_TIMEOUT_S", 0.1)
    stream = request.param()
    yield stream
    stream.close()


BROKEN = pytest.mark.parametrize("broken", [OnFullDisk, Unread], indirect=True)


def start(config, out, *flags, **streams):
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
    return start_train(config, f"--out_dir={out}", *flags, **streams)


def ends(process, seconds=HANG_S):
    """Its exit status. A process that does not end is killed."""
    try:
        return process.wait(seconds)
    finally:
        process.kill()
        process.wait()


def make_watchdog(config, **attributes):
    watchdog = Watchdog()
    watchdog.begin(load_config([str(config)]))
    for name, value in attributes.items():
        setattr(watchdog, name, value)
    return watchdog


@contextlib.contextmanager
def inbox(watchdog):
    """What entering the watchdog makes, without its thread and its signal handlers."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    watchdog.signals.inbox, wakeup = socket.socketpair()
    with watchdog.signals.inbox, wakeup:
        yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_hang_ends_with_stderr_on_a_full_disk(config, tmp_path):
    with open("/dev/full", "w") as full:
        assert ends(start(config, tmp_path, *FOR_EVER, AT_ONCE, stderr=full)) == 1
    assert last_run(tmp_path)["status"] == "failed"


def wait_for(condition, process, seconds=HANG_S):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)


FAILS, SAVED = {"_tick": lambda ticks: 1 / 0}, {"final_status": 143}
ASKED_LONG_AGO = {"first": 0, "stop_asked_at": -10.0, "consensus": SimpleNamespace(ask=print)}
ENDINGS = {  # what ends a run -> (what the watchdog has, what happens to it, the exit status)
    "a hang": ({}, lambda made: made._leave_because("no progress", is_cause=True), 1),
    "a second Ctrl-C": (ASKED_LONG_AGO, lambda made: made._handle_signal(signal.SIGINT), 130),
    "an error of its own": (FAILS, Watchdog._run, 1),
    "an error of its own after everything is saved": (FAILS | SAVED, Watchdog._run, 143),
}


@BROKEN
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_watchdog_ends_a_run_whatever_stderr_does(config, left, broken, ending, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    attributes, end, status = ENDINGS[ending]
    watchdog, began = make_watchdog(config, **attributes), time.monotonic()
    with pytest.raises(Left), contextlib.redirect_stderr(broken), inbox(watchdog):
        end(watchdog)
    assert left == [status] and time.monotonic() - began < HANG_S
    if ending == "an error of its own":
        told = "error: the watchdog failed: ZeroDivisionError: division by zero"
        assert told in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_a_request_to_stop_passes_a_log_that_is_blocked(config):
    """The main thread waits in a write to a full pipe and holds the handler's lock."""
    asked = []
    watchdog = make_watchdog(config, first=0)
    watchdog.consensus = SimpleNamespace(ask=lambda *question: asked.append(question))
    log, handler = logging.getLogger("nanomfu"), logging.StreamHandler(io.StringIO())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    handling = threading.Thread(target=watchdog._handle_signal, args=[signal.SIGTERM], daemon=True)
    try:
        with handler.lock:
            handling.start()
            handling.join(HANG_S)
            assert not handling.is_alive() and asked == [("stop", signal.SIGTERM)]
    finally:
        log.removeHandler(handler)


def test_torchruns_store_that_does_not_answer_delays_no_end(config, monkeypatch):
    """torchrun is stopped, or its machine is gone. Once it answers again, it is asked again."""
    monkeypatch.setattr("training.faults.liveness.ANSWER_TIMEOUT_S", 0.3)
    back, asked, waits = threading.Event(), [], []

    class Store:
        def compare_set(self, key, before, value):
            asked.append(value)
            back.wait()
            return value.encode()

    def counted(wait):
        return lambda *arguments, **keys: (waits.append(1), wait(*arguments, **keys))[1]

    monkeypatch.setattr(liveness_module, "within", counted(liveness_module.within))
    liveness = Liveness()
    turn, liveness.store = liveness.asking, Store()
    liveness.asking = SimpleNamespace(acquire=counted(turn.acquire), release=turn.release)
    assert [liveness.end_all(reason) for reason in "abcdefghi"] == list("abcdefghi")
    assert asked == ["a"] and len(waits) == 2, "it waits once: for its turn, and for the answer"
    back.set()
    liveness.overdue.wait(5)
    liveness.end_all("z")
    assert asked == ["a", "z"]


@pytest.mark.parametrize(("error", "status"), [(UserError("x"), 2), (RunError("x"), 1), (ValueError("x"), 1)])
@BROKEN
def test_no_output_and_no_launcher_changes_an_exit_status(broken, error, status):
    with contextlib.redirect_stderr(broken):
        assert exit_status.end_with(error) == status


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/error.json"])
def test_a_launcher_that_cannot_be_told_changes_no_exit_status(config, run, tmp_path, monkeypatch, path):
    """SIGTERM 143, user errors 2."""
    (tmp_path / "error.json").symlink_to(path)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run(config, f"--out_dir={tmp_path}", "--max_iters=x") == 2

    save = train.EvaluateAndSave.before_update

    def stopped(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return save(self, *arguments)

    monkeypatch.setattr(train.EvaluateAndSave, "before_update", stopped)
    assert run(config, f"--out_dir={tmp_path}", *FOR_EVER) == 143


def test_torchrun_finds_a_whole_error_file_or_none(tmp_path, monkeypatch):
    """torchrun itself ends with a traceback if it finds half a file, as a full disk leaves it."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with largest_file(10):
        exit_status.tell_launcher("what happened")
    assert not path.exists()


@BROKEN
def test_a_process_ends_even_if_its_output_cannot_be_flushed_or_no_thread_can_be_started(
    left, broken, monkeypatch
):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with contextlib.redirect_stderr(broken), contextlib.redirect_stdout(broken):
        with pytest.raises(Left):
            exit_status.leave_now(3)
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(Left):
            exit_status.leave_now(4)
    assert left == [3, 4]


@pytest.mark.parametrize(
    "closed", [">&- 2>&-", *(pytest.param(one, marks=pytest.mark.slow) for one in ("2>&-", ">&-"))]
)
def test_a_run_needs_no_console(config, tmp_path, closed):
    command = shlex.join([sys.executable, "train.py", str(config), f"--out_dir={tmp_path}"])
    done = warm_python.run(
        f"exec {command} {closed}", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert last_run(tmp_path)["status"] == "completed"


def test_a_closed_stderr_is_not_the_number_of_another_file():
    """Otherwise a library's messages could be written into a checkpoint."""
    program = (
        "import os, sys; from common.command import prepare_output; prepare_output();"
        "sys.exit(open('/dev/zero').fileno() < 3 or os.readlink('/proc/self/fd/2') != os.devnull)"
    )
    command = f"exec {shlex.join([sys.executable, '-c', program])} 2>&- >&- <&-"
    assert warm_python.run(command, shell=True, cwd=ROOT, timeout=HANG_S).returncode == 0


def test_rows_are_printed_whatever_the_console_can_show(config, run, tmp_path):
    raw = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(raw, encoding="ascii", write_through=True)):
        assert run(config, f"--out_dir={tmp_path}") == 0
        shown = raw.getvalue().decode("ascii")
    assert shown.count("? Iter ") == TINY["max_iters"], shown[-2000:]
    (log,) = tmp_path.glob("run_*.log")
    assert log.read_text(encoding="utf-8").count("\N{ROUND PUSHPIN} Iter ") == TINY["max_iters"]


def test_a_reader_that_has_seen_enough_ends_no_run(config, tmp_path):
    """train.py ... | head -1"""
    process = start(config, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert ends(process) == 0
    assert process.stderr.read().count("Broken pipe") == 1
    assert last_run(tmp_path)["status"] == "completed"


STRAY = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "x"), ("WORLD_SIZE", "")]


@pytest.mark.parametrize(("name", "value"), STRAY)
def test_stray_variables_are_one_clear_message(config, run, tmp_path, monkeypatch, capsys, name, value):
    monkeypatch.setattr(exit_status, "RANK_0_SPEAKS_FIRST_S", 0)
    monkeypatch.setattr(exit_status, "leave_now", lambda status: None)  # as with several processes
    monkeypatch.setenv(name, value)
    assert run(config, f"--out_dir={tmp_path}/out") == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"error: the environment has {name}={value!r}, but torchrun did not start" in line
    assert not (tmp_path / "out").exists()


def test_world_size_stands_in_for_torchrun_in_a_dry_run(config, run, monkeypatch, capsys):
    monkeypatch.setattr(exit_status, "RANK_0_SPEAKS_FIRST_S", 0)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert run(config, "--dry_run=True") == 0
    assert "MODEL ARCHITECTURE" in capsys.readouterr().out
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("RANK", "3")
    assert run(config, "--dry_run=True") == 2, "it would print nothing"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "abc")  # of an earlier torchrun
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert launch.restart_count() == 0 and not launch.may_restart()


def test_ctrl_c_while_torch_is_imported_ends_without_a_traceback(config, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOMFU_COLD_PROCESSES", "1")
    process = start(config, tmp_path, *FOR_EVER, stderr=subprocess.PIPE)
    wait_for(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), process)
    process.send_signal(signal.SIGINT)
    assert ends(process, 20) == -signal.SIGINT
    assert process.stderr.read() == ""


def test_a_data_worker_that_was_killed_is_one_message(config, tmp_path):
    workers = ["--use_dataloader=True", "--dataloader_num_workers=1"]
    process = start(config, tmp_path, *FOR_EVER, *workers, stderr=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    # in training: in an import of the first iteration, torch catches its own error and prints a traceback
    wait_for(lambda: any("📍 Iter" in log.read_text() for log in tmp_path.glob("run_*.log")), process)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    assert ends(process, 30) == 1
    stderr = process.stderr.read()
    assert "error: DataLoader worker" in stderr and "--dataloader_num_workers" in stderr
    assert "Traceback" not in stderr
    assert last_run(tmp_path)["status"] == "failed"
