"""A fork of tests/support/warm_python.py is as a fresh interpreter in everything that tests look at."""

import os
import subprocess
import sys

import pytest
from support import warm_python
from support.helpers import ROOT

PROBE = """
import json, os, signal, sys, threading
print(json.dumps({
    "name": __name__, "file": os.path.abspath(__file__), "argv": sys.argv,
    "path": sys.path[0], "cwd": os.getcwd(),
    "environment": {key: value for key, value in os.environ.items() if key != "LC_CTYPE"},
    "command": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[1:],
    "leads a session": os.getsid(0) == os.getpid(), "own group": os.getpgid(0) == os.getpid(),
    "files": sorted(os.listdir("/proc/self/fd"))[:-1], "threads": threading.active_count(),
    "input": sys.stdin.read(), "handlers": [str(signal.getsignal(n)) for n in (2, 13, 15, 17)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)],
    "project": [name for name in sys.modules if name.split(".")[0] in ("training", "train", "model", "data")],
}))
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(text): its path. Also where NANOMFU_COLD_PROCESSES is set, processes are forks."""
    monkeypatch.delenv("NANOMFU_COLD_PROCESSES", raising=False)

    def write(text: str) -> str:
        (tmp_path / "script.py").write_text(text)
        return str(tmp_path / "script.py")

    return write


def both(*arguments: str, **keywords) -> list[subprocess.CompletedProcess]:
    """[fork, fresh interpreter] of the same command."""
    keywords = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60, **keywords}
    return [run([sys.executable, *arguments], **keywords) for run in (warm_python.run, subprocess.run)]


@pytest.mark.parametrize("flags", [[], ["-u"], ["-m"]])
def test_a_script_or_a_module_finds_the_same_process(script, tmp_path, flags):
    path, arguments = script(PROBE), ["--key=value", ""]
    command = [*flags, "script" if flags == ["-m"] else path, *arguments]
    where = dict(cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL)
    fork, fresh = both(*command, **where, start_new_session=flags == ["-u"])
    assert fork.returncode == fresh.returncode == 0, fork.stderr
    assert fork.stdout == fresh.stdout != "" and fork.stderr == fresh.stderr == ""


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit('a message')",
        "raise ValueError('so')",
        "raise KeyboardInterrupt",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit; atexit.register(print, 'at exit'); print('first')",
        "import threading, time; threading.Timer(0.1, print, ['a thread']).start()",
    ],
)
def test_a_script_ends_with_the_same_status_output_and_last_line(script, text):
    fork, fresh = both(script(text))
    assert (fork.returncode, fork.stdout) == (fresh.returncode, fresh.stdout)
    assert fork.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]
