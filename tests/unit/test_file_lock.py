"""A disk without locks: whoever takes one warns, with the file and what to see to, and goes on."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import types

import pytest
from support.helpers import ROOT

from bench.runner import claim
from common.command import run_command
from common.file_lock import take_lock
from tools import track, trackers
from training.process.run_lock import RunLock
from training.records.run_record import RunRecord


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def no_locks(request, monkeypatch):
    """What the system says of this error."""

    def refuse(*_):
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    return os.strerror(request.param)


def test_a_run_begins(no_locks, tmp_path, caplog):
    with RunLock(tmp_path) as lock:
        lock.acquire()
    (said,) = caplog.messages
    assert said.startswith(
        f"{tmp_path / 'run.lock'} cannot be locked ({no_locks}): nothing prevents a second"
    )


def test_a_benchmark_has_its_claim(no_locks, tmp_path, caplog):
    with claim(tmp_path / "runs" / "speed.lock") as ours:
        assert ours
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path / 'runs/speed.lock'} cannot be locked ({no_locks}): ")
    assert "start one at a time" in said


def test_a_tracker_gets_everything(no_locks, tmp_path, caplog, monkeypatch):
    sent = []
    fake = types.SimpleNamespace(open=lambda run: trackers.NOTHING, close=lambda record: None)
    fake.send = lambda step, figures: sent.append(step)
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", lambda: fake)
    monkeypatch.setattr(track, "require_tracker", lambda name: None)
    content = RunRecord(tmp_path / "run_20260101_000000.json", {}, {}, False, None, 0)
    for iteration in range(3):
        content.add("training_iterations", {"iter": iteration, "loss": 2.5})
    content.path.write_text(json.dumps(content.content | {"status": "completed"}, default=list))
    assert run_command(track.main, [str(content.path), "--trackers=tensorboard"]) == 0
    (said,) = caplog.messages
    assert sent == [0, 1, 2]
    assert said.startswith(f"{tmp_path / 'trackers.lock'} cannot be locked ({no_locks}): start no second")


HOLDS = """
import sys
from pathlib import Path
from common.file_lock import take_lock
file = open(sys.argv[1], "w")
print(take_lock(file.fileno(), Path(sys.argv[1]), ""), flush=True)
sys.stdin.readline()
"""


def test_a_lock_that_another_process_holds_is_refused_or_waited_for(tmp_path, caplog):
    path = tmp_path / "lock"
    holds = [sys.executable, "-c", HOLDS, path]
    with subprocess.Popen(holds, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        with open(path, "w") as file:
            assert not take_lock(file.fileno(), path, "")
            other.stdin.write("\n")  # it ends
            other.stdin.flush()
            assert take_lock(file.fileno(), path, "", wait=True)
    assert not caplog.messages
