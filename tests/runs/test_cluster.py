"""What data/cluster.py promises: the bytes of one machine, through datatrove's executors. Slurm's programs
are stood in for by scripts that run each task at once; Ray is not tested here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm_python
from support.helpers import ROOT
from support.preparation import ENVIRONMENT, prepare_text, small_bpe, write_jsonl

from common.errors import UserError
from data import cluster

SBATCH = """
import os, pathlib, re, subprocess, sys
home = pathlib.Path(__file__).parent
job = len(list(home.glob("job*")))
script = pathlib.Path(sys.argv[-1]).read_text()
(home / f"job{job}").write_text(script)
status = 0
waits = [word.split(":")[-1] for word in sys.argv if word.startswith("--dependency=afterok")]
if all((home / f"status{other}").read_text() == "0" for other in waits):
    last = int(re.search(r"--array=0-(\\d+)", script)[1])
    for task in range(last + 1):
        env = {**os.environ, "SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "here", "RUN_OFFSET": "0"}
        log = open(home / f"log{job}", "a")
        status |= subprocess.run(["bash", sys.argv[-1]], env=env, stdout=log, stderr=log).returncode
(home / f"status{job}").write_text(str(status))
print("Submitted batch job", job)
"""
SRUN = 'while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done; exec "$@"'


@pytest.fixture
def slurm(tmp_path) -> Path:
    """A folder of sbatch, srun and scontrol that run everything at once."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!{sys.executable}\n{SBATCH}")
    (folder / "srun").write_text(f"#!/bin/bash\n{SRUN}\n")
    (folder / "scontrol").write_text("#!/bin/bash\necho here\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    return folder


@pytest.fixture
def corpus(tmp_path) -> list:
    """Options of data/text/prepare.py for four files."""
    (tmp_path / "in").mkdir()
    for i in range(4):
        write_jsonl(tmp_path / "in" / f"{i}.jsonl", [f"text {j} of {i}" for j in range(30)])
    return ["--input", tmp_path / "in", "--tokenizer", small_bpe(tmp_path / "bpe"), "--val_fraction", 0.1]


def submit(*arguments, path: Path | None = None) -> subprocess.CompletedProcess:
    env = ENVIRONMENT if path is None else {**ENVIRONMENT, "PATH": f"{path}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "data.cluster", "text", *map(str, arguments)]
    return warm_python.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def contents(folder: Path) -> dict[str, bytes]:
    paths = [*folder.glob("*.bin"), *folder.glob("meta.*"), *folder.glob("units/*")]
    return {path.name: path.read_bytes() for path in paths}


def on_one_machine(folder: Path, corpus: list) -> dict[str, bytes]:
    prepare_text("--output", folder, *corpus)
    return contents(folder)


@pytest.mark.slow
def test_tasks_on_this_machine_give_the_bytes_of_one_process(tmp_path, corpus):
    pytest.importorskip("datatrove")
    out = tmp_path / "out"
    options = ["--executor", "local", "--tasks", 2, "--output", out]
    bad = tmp_path / "in" / "3.jsonl"
    whole = bad.read_text()
    bad.write_text(whole + "cut o")
    result = submit(*options, "--", *corpus)
    assert result.returncode == 2 and "parts are missing" in result.stderr and "line 31" in result.stderr
    assert len(list(out.glob("units/*.json"))) == 3 and not (out / "meta.json").exists()
    result = submit(*options, "--", *corpus, "--max_bad", 1)
    assert result.returncode == 0, result.stderr
    assert contents(out) == on_one_machine(tmp_path / "one", [*corpus, "--max_bad", 1])


@pytest.mark.slow
def test_slurm_runs_the_parts_and_then_what_completes_them(tmp_path, corpus, slurm):
    pytest.importorskip("datatrove")
    out = tmp_path / "out"
    options = ["--executor", "slurm", "--tasks", 2, "--workers", 3, "--partition", "cpu", "--time", "1:00:00"]
    options += ["--sbatch", "account=x", "--output", out]
    result = submit(*options, "--", *corpus, path=slurm)
    assert result.returncode == 0, result.stderr
    assert contents(out) == on_one_machine(tmp_path / "one", corpus), (slurm / "log0").read_text()
    script = (slurm / "job0").read_text()
    wanted = ("array=0-1", "cpus-per-task=3", "mem-per-cpu=2G", "partition=cpu", "time=1:00:00", "account=x")
    assert [word for word in wanted if f"#SBATCH --{word}" not in script] == []
    assert re.search(r"text-finish", (slurm / "job2").read_text())  # job 1 gathers datatrove's statistics


def test_what_is_wrong_with_the_dataset_is_said_before_anything_is_submitted(tmp_path, corpus, slurm):
    pytest.importorskip("datatrove")
    options = ["--executor", "slurm", "--tasks", 2, "--partition", "cpu", "--time", "1:00:00"]
    result = submit(*options, "--output", tmp_path / "out", "--", *corpus, "--worker_count", 3, path=slurm)
    assert result.returncode == 2 and "unrecognized arguments: --worker_count" in result.stderr
    result = submit(*options, "--output", tmp_path / "out", "--", *corpus[:3], "gtp2", path=slurm)
    assert result.returncode == 2 and "no tokenizer 'gtp2'" in result.stderr
    assert not list(slurm.glob("job*"))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--executor", "slurm", "--tasks", "2"], "Slurm needs --partition and --time"),
        (["--executor", "local", "--tasks", "0"], "--tasks: 0 is not between 1 and 100,000"),
        (["--executor", "local", "--tasks", "2", "--", "--part=1"], "--part=1 cannot follow --"),
        (["--executor", "local", "--tasks", "2", "--", "--no-resume"], "--no-resume cannot follow --"),
        (["--executor", "pbs", "--tasks", "2"], "invalid choice: 'pbs'"),
    ],
)
def test_options_that_cannot_work_are_refused(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cluster", "text", *words])
    with pytest.raises(SystemExit):
        cluster.main()
    assert message in capsys.readouterr().err


def test_without_datatrove_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cluster", "text", "--executor", "local", "--tasks", "2"])
    monkeypatch.setitem(sys.modules, "datatrove", None)
    with pytest.raises(UserError, match="pip install -r requirements-data.txt"):
        cluster.main()
    monkeypatch.setattr(sys, "argv", ["cluster", "absent", "--executor", "local", "--tasks", "2"])
    with pytest.raises(UserError, match="there is no .*absent/prepare.py"):
        cluster.main()
