"""What a preparation says of files that it does not read, and how Ctrl-C ends it."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.helpers import HANG_S, ROOT
from support.preparation import ENVIRONMENT, prepare_command, run_prepare, small_bpe, write_jsonl

from data.pipeline import input_files
from data.pipeline.input_files import find_files
from data.quickstart import prepare as quickstart


def test_of_very_many_files_some_are_named_and_the_others_counted(tmp_path, capsys):
    for number in range(input_files.SHOWN_FILES + 7):
        (tmp_path / f"{number:03}.doc").touch()
    (tmp_path / "\x1b[2J.doc").touch()
    (tmp_path / "a.txt").write_text("text")
    find_files([str(tmp_path)])
    line = capsys.readouterr().out
    assert "and 8 more" in line and line.count(".doc") == input_files.SHOWN_FILES and "\x1b" not in line


NOTES = ("README.md", "readme_de.txt", "LICENSE.txt", "Licence-MIT.md", "CHANGELOG.rst", "NOTICE.txt")
TEXTS = ("a.txt", "b.md", "load.py", "notices.txt", "my_readme.md", "readmes.md", "licensee.txt", "sub/c.txt")


def test_beside_files_of_many_documents_only_notes_are_left_out_and_all_is_said(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    for name in (*NOTES, *TEXTS):
        (tmp_path / name).write_text(f"what {name} says")
    assert len(find_files([str(tmp_path)])) == len(NOTES + TEXTS) and not capsys.readouterr().out
    records = write_jsonl(tmp_path / "sub" / "a.jsonl", ["text"])
    texts = [tmp_path / name for name in TEXTS]
    assert find_files([str(tmp_path)]) == sorted([*texts, records])
    left_out, read = capsys.readouterr().out.splitlines()
    assert left_out.startswith(
        f"left out {len(NOTES)} (a note beside files of many documents; name it to read"
    )
    assert read.startswith(f"one document each {len(TEXTS)} (") and "load.py" in read
    assert all(str(tmp_path / name) in left_out for name in NOTES)
    assert tmp_path / "README.md" in find_files([str(tmp_path), str(tmp_path / "README.md")])


def test_the_quickstart_names_a_module_that_it_cannot_read(tmp_path, monkeypatch, capsys):
    for number in range(30):
        (tmp_path / f"m{number}.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(quickstart.sysconfig, "get_path", lambda name: str(tmp_path))
    assert len(quickstart.read_stdlib(10**6)) == 30
    assert "left out 1 (not UTF-8 text): " in (line := capsys.readouterr().out) and "latin.py" in line


# --- Ctrl-C ---


def processes_of(group: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


# Python runs this when it starts: the second worker is still importing modules while the first one works.
SLOW_START = """
import os, sys, time
if "--multiprocessing-fork" in sys.orig_argv:
    try:
        os.close(os.open({once!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        time.sleep(60)
"""


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("workers start", marks=pytest.mark.slow),
        "parts are made",
        "parts are made, a worker starts",
        "parts are made, kill -9",
    ],
)
def test_ctrl_c_is_one_line_and_status_130_and_the_same_command_goes_on(tmp_path, moment):
    """kill -9 of the parent ends its workers, too: they would write what the next command writes."""
    (tmp_path / "in").mkdir()
    for number in range(40):
        texts = [f"{number} {line} some text " * 60 for line in range(60)]
        write_jsonl(tmp_path / f"in/{number:02}.jsonl", texts)
    command = ["--input", tmp_path / "in", "--tokenizer", small_bpe(tmp_path / "bpe"), "--workers", 2]
    out, environment = tmp_path / "out", dict(ENVIRONMENT)
    if "a worker" in moment:
        (tmp_path / "sitecustomize.py").write_text(SLOW_START.format(once=str(tmp_path / "once")))
        environment["PYTHONPATH"] = str(tmp_path)
    process = subprocess.Popen(
        prepare_command("text", *command, "--output", out, part_bytes=100_000),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + HANG_S
    while len(list(out.glob("parts/*")) if "parts" in moment else processes_of(process.pid)) < 4:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    time.sleep(0.1 if moment == "workers start" else 0)  # they are importing modules then
    if "a worker" in moment:  # on a busy machine, it may have the signal long before the parent reacts
        for worker in set(processes_of(process.pid)) - {process.pid}:
            os.kill(worker, signal.SIGINT)
        time.sleep(0.5)
    killed = "kill" in moment
    if killed:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the parent and to all workers
    stdout, stderr = process.communicate(timeout=HANG_S)  # the workers, too, have closed it then
    assert process.returncode == (-9 if killed else 130), stderr
    assert "Traceback" not in stderr and "KeyboardInterrupt" not in stderr
    last = stderr.replace("\r", "\n").splitlines()[-1]
    assert killed or last == "interrupted; what is complete is kept: the same command goes on"
    deadline = time.monotonic() + HANG_S  # the tracker of shared memory ends just after the others
    while processes_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(process.pid) == [] and not (out / "meta.json").exists()
    for folder in (out, tmp_path / "whole"):
        assert run_prepare("text", *command, "--output", folder, part_bytes=100_000).returncode == 0
    assert contents(out) == contents(tmp_path / "whole") != {}
