"""What a newcomer meets first: make, --help, Tab, Windows, and a machine without a network."""

import os
import re
import shlex
import subprocess
import sys
import urllib.error

import pytest
from support.helpers import HANG_S, ROOT

from data.huggingface import NO_ANSWER, OFFLINE, why_no_download
from training.configuration.help import FIRST, help_text
from training.configuration.keys import KEYS

# --- make ---


def completed(command: list, **keywords) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, **keywords)


def make(*arguments) -> subprocess.CompletedProcess:
    """As a user's own: the tests may be started by make, whose flags and variables a child takes over."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return completed(["make", "--no-print-directory", *map(str, arguments)], env=own)


def test_make_help_lists_every_target():
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
    done = make("help")
    assert done.returncode == 0 and re.findall(r"^make ([\w-]+) +\S", done.stdout, re.M), done.stderr
    assert set(re.findall(r"^make ([\w-]+) +\S", done.stdout, re.M)) == set(targets.split())
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_packages_that_cannot_be_installed_are_one_message_with_what_to_do(tmp_path):
    done = make("setup", f"VENV={tmp_path}", "PYTHON=true", "PIP=false")
    assert done.returncode == 2 and not (tmp_path / ".installed").exists()
    assert "export HTTPS_PROXY=http://HOST:PORT" in done.stderr
    assert "touch FOLDER/.installed; make train VENV=FOLDER" in done.stderr
    (tmp_path / ".installed").touch()
    assert "pip install" not in make("-n", "train", f"VENV={tmp_path}", "PYTHON=true").stdout


def test_make_train_ends_with_a_text_and_the_summary():
    commands = make("-n", "train").stdout.splitlines()
    assert "sample.py --out_dir=out-quickstart" in commands[-2]
    assert re.search(r"tail -n 5 .*run_\*.*\.log", commands[-1])


# --- help ---


def test_help_begins_with_what_people_set_first_in_groups():
    first, _, rest = help_text().partition("\n\n--- every key ---\n\n")
    for group, names in FIRST.items():
        lines = first.partition(f"\n\n{group}\n")[2].partition("\n\n")[0].splitlines()
        assert lines == [f"  --{name}={KEYS[name].default}: {KEYS[name].help}" for name in names]
        assert all(f"\n  --{name}=" in rest for name in names), "and once more with all others"
    assert len(first.splitlines()) <= 50, "as much as a window shows"


def test_tab_completes_every_key(tmp_path):
    """By the line of bash that --help prints."""
    (line,) = re.findall(r"^ +(complete .*)$", help_text(), re.M)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    script = f'PATH={shlex.quote(str(tmp_path))}:"$PATH"; {line}; complete -p python'
    done = completed(["bash", "-c", script])
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"--(\w+)=", done.stdout)) == set(KEYS)


# --- Windows ---


@pytest.mark.parametrize(
    "path", ["train.py", "sample.py", "plots/report.py", "data/quickstart/prepare.py", "data/text/prepare.py"]
)
def test_windows_is_refused_in_one_line_that_names_wsl(path):
    code = (
        "import runpy, sys; sys.platform = 'win32';"
        "sys.modules['fcntl'] = sys.modules['resource'] = None;"  # an import of it fails, as there
        "sys.modules['torch'] = type(sys)('torch');"  # which would look for files of Windows
        f"sys.argv = [{path!r}]; runpy.run_path({path!r}, run_name='__main__')"
    )
    done = completed([sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "Windows is not supported" in line and "wsl --install" in line


# --- no network ---


def test_without_an_answer_a_proxy_may_be_missing(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    answered = urllib.error.HTTPError("https://x", 404, "Not Found", None, None)
    assert why_no_download(answered) == "(HTTPError: HTTP Error 404: Not Found)"
    refused = urllib.error.URLError("refused")
    assert why_no_download(refused) == f"(URLError: <urlopen error refused>){NO_ANSWER}"
    assert "HTTPS_PROXY" in NO_ANSWER
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert why_no_download(refused).endswith(NO_ANSWER), "another server's"
    errors = pytest.importorskip("huggingface_hub.errors")
    assert why_no_download(errors.LocalEntryNotFoundError("no file")).endswith(OFFLINE)
