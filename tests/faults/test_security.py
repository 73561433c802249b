"""What others wrote cannot execute code or lead out of its folder; what is secret stays secret; nothing is
sent; two runs do not share an out_dir."""

import ast
import contextlib
import json
import os
import re
import select
import signal
import sys
import time

import pytest
import torch
from support import warm_python
from support.helpers import (
    HANG_S,
    ROOT,
    TINY,
    edit_json,
    last_run,
    make_dataset,
    run_train,
    start_train,
    write_config,
)

from common.errors import UserError
from training.checkpoints.loading import load_model
from training.process import redaction as redact
from training.process import run_lock
from training.records.rows import Logger

pytestmark = pytest.mark.security
SOURCES = [  # not what is hidden, such as .venv
    path
    for path in ROOT.glob("**/*.py")
    if not any(part in ("tests", "venv") or part.startswith(".") for part in path.relative_to(ROOT).parts)
]


@pytest.fixture
def dataset(tmp_path):
    return make_dataset(tmp_path / "tokens")


@pytest.fixture
def config(tmp_path, dataset):
    return write_config(tmp_path / "run.py", **TINY, dataset=dataset, out_dir=tmp_path / "out")


# --- 24: nothing that is read executes code ---


# what a source file may not name -> the one that may, and why
ALLOWED = {
    "exec": ("training/configuration/files_and_flags.py",),  # the config file, which the user runs
    # meta.pkl, and a memory snapshot: written for other programs
    "pickle.dumps": ("data/pipeline/meta_file.py",),
}
FORBIDDEN = re.compile(
    r"eval|exec|__import__|os\.(system|popen)|marshal\.loads?|shelve\.open|yaml\.\w*load\w*|joblib\.load"
    r"|(c?[pP]ickle|dill|cloudpickle)\.(loads?|dumps?|Unpickler)|pd\.read_pickle"
    r"|(tarfile|zipfile)\.\w+|shutil\.unpack_archive"
)
MUST_BE = {"weights_only": "True", "allow_pickle": "False", "trust_remote_code": "False", "shell": "False"}


def dangers(source: str) -> list[tuple[str, int]]:
    """(name, line) of every forbidden name that the source uses, and of every argument that allows code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Name, ast.Attribute)) and FORBIDDEN.fullmatch(ast.unparse(node)):
            found.append((ast.unparse(node), node.lineno))
        elif isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "tarfile", "zipfile"):
            found.append((f"from {node.module}", node.lineno))
        elif isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if ast.unparse(node.func) == "torch.load":
                given.setdefault("weights_only", "not given")
            found += [
                (f"{key}={given[key]}", node.lineno)
                for key in MUST_BE
                if given.get(key, MUST_BE[key]) != MUST_BE[key]
            ]
    return found


DANGEROUS = """
import pickle
from pickle import load
pickle.load(f); eval(x); tarfile.open(p); torch.load(p); np.load(p, allow_pickle=True)
torch.load(p, weights_only=True); model.eval(); subprocess.run(c, shell=True)
"""


def test_no_source_file_can_execute_what_it_reads():
    """Nor does any unpack an archive."""
    found = {"from pickle", "pickle.load", "eval", "tarfile.open", "weights_only=not given"}
    assert {name for name, _ in dangers(DANGEROUS)} == {*found, "allow_pickle=True", "shell=True"}
    faults = []
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        used = dangers(path.read_text(encoding="utf-8"))
        faults += [f"{name}:{line}: {what}" for what, line in used if name not in ALLOWED.get(what, ())]
    assert len(SOURCES) > 60 and faults == []


# --- 24: nothing that is read leads out of its folder ---


@pytest.mark.parametrize("linked", ["folder", "manifest.json", "state.json", "tensors"])
def test_a_checkpoint_that_leads_elsewhere_is_not_followed(run, config, tmp_path, capfd, linked):
    """Not even to the very files: a resume takes the one before, and whoever names it is refused."""
    checkpoints, outside = tmp_path / "out" / "checkpoints", tmp_path / "outside"
    assert run(config, "--max_iters=4", "--eval_interval=2") == 0
    newest = path = checkpoints / "step-00000004"
    if linked != "folder":
        path = min(newest.glob("tensors-*")) if linked == "tensors" else newest / linked
    path.rename(outside)
    path.symlink_to(outside)
    problem = f"{path.name} is a link, which is not followed; put a copy in its place"
    capfd.readouterr()
    resume = config, "--max_iters=6", "--eval_interval=2", "--init_from=resume"
    assert run(*resume, f"--resume_from={newest.name}") == 2
    assert problem in capfd.readouterr().err
    with pytest.raises(UserError, match="is a link"):
        load_model(tmp_path / "out", newest.name, torch.device("cpu"))
    assert run(*resume) == 0
    assert problem in capfd.readouterr().out
    assert last_run(tmp_path / "out")["startup_info"]["resumed_from"] == str(checkpoints / "step-00000002")
    assert outside.exists() and os.path.lexists(f"{newest}.corrupt")


# --- 25: secrets ---

SECRETS = {
    "WANDB_API_KEY": "canary-wandb-8391",
    "HF_TOKEN": "hf_canary8391token",
    "AWS_SECRET_ACCESS_KEY": "canary/aws+8391",
    "DB_PASSWORD": "canary8391password",
}
URL_PASSWORD = "canary8391url"
URL = f"https://user:{URL_PASSWORD}@host.example/team"

WANDB = """
import json, os, types
def _note(*content):
    with open(os.environ["WANDB_SEEN"], "a") as file: file.write(json.dumps(content, default=str) + "\\n")
def setup(): return types.SimpleNamespace(settings=types.SimpleNamespace(mode="offline"))
def Settings(**settings): return settings
class Run:
    url, summary = None, {}
    def define_metric(self, *names, **settings): pass
    def log(self, row, step, commit): _note("log", row, step)
    def finish(self, exit_code): _note("finish", exit_code, self.summary)
def init(**arguments):
    _note("init", arguments)
    return Run()
"""


def hits(root) -> list[str]:
    """Where a canary is written, below root."""
    found = []
    for path in (path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        content = path.read_bytes()
        secrets = (*SECRETS.values(), URL_PASSWORD)
        found += [f"{secret} in {path}" for secret in secrets if secret.encode() in content]
    return found


def test_no_secret_of_the_environment_or_of_a_url_is_written_or_sent(dataset, tmp_path):
    out_dir, seen = tmp_path / "out", tmp_path / "sent" / "wandb.txt"
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    seen.parent.mkdir()
    keys = {**TINY, "eval_interval": 2, "trackers": "wandb", "wandb_project": URL}
    keys |= {"wandb_run_name": f"of {URL}"}
    config = write_config(tmp_path / "run.py", **keys, dataset=dataset, out_dir=out_dir)
    env = {**SECRETS, "PYTHONPATH": str(tmp_path / "modules"), "WANDB_SEEN": str(seen)}
    done = run_train(config, **env)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert [secret for secret in (*SECRETS.values(), URL_PASSWORD) if secret in shown] == []
    assert hits(out_dir) == hits(seen.parent) == []
    assert last_run(out_dir)["config"]["wandb_project"] == "https://***@host.example/team"
    sent = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [each[0] for each in sent] == ["init", *["log"] * 5, "finish"], "4 iterations, and the end"
    assert sent[0][1]["project"] == "https://***@host.example/team"
    assert (out_dir / "checkpoints" / "step-00000004" / "state.json").is_file(), "it was searched, too"


def test_error_of_another_library_does_not_give_a_secret_away(run, config, tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError(f"401 from {URL} with {SECRETS['HF_TOKEN']} and {SECRETS['DB_PASSWORD']}")

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    redact._secrets.cache_clear()
    monkeypatch.setattr(Logger, "read", fail)
    assert run(config) == 1
    redact._secrets.cache_clear()
    printed = capfd.readouterr()
    assert "401 from https://***@host.example/team with ***HF_TOKEN***" in printed.err
    assert not [secret for secret in (*SECRETS.values(), URL_PASSWORD) if secret in printed.out + printed.err]
    assert "401 from" in next((tmp_path / "out").glob("run_*.log")).read_text()
    assert hits(tmp_path / "out") == []


def test_no_rest_of_a_secret_and_no_password_of_a_url_is_shown(run, config, monkeypatch, capfd):
    for name, value in {"A_TOKEN": "abcd1234", "B_KEY": "abcd1234efgh"}.items():
        monkeypatch.setenv(name, value)
    redact._secrets.cache_clear()
    assert redact.redact("of abcd1234efgh and abcd1234") == "of ***B_KEY*** and ***A_TOKEN***"
    redact._secrets.cache_clear()
    for key in ("out_dir", "dataset"):
        assert run(config, f"--{key}={URL}") == 2
        error = capfd.readouterr().err
        assert "is a URL" in error and URL_PASSWORD not in error


# --- 26: no network ---


def test_training_resume_and_sampling_need_no_network_and_try_none(tmp_path):
    """An audit hook counts attempts."""
    dataset, out_dir = make_dataset(tmp_path / "tokens"), tmp_path / "out"
    tokenizer = {"kind": "char", "name": "char", "chars": "".join(map(chr, range(32, 96)))}
    edit_json(dataset / "meta.json", format=1, tokenizer=tokenizer, eot_id=None)
    keys = {**TINY, "eval_interval": 2, "dataset": dataset, "out_dir": out_dir}
    config = write_config(tmp_path / "run.py", **keys)
    commands = [
        ["train.py", str(config), "--max_iters=2", "--use_dataloader=True"],
        ["train.py", str(config), "--init_from=resume"],
        ["sample.py", f"--out_dir={out_dir}", "--prompt=A", "--num_samples=1", "--max_new_tokens=2"],
    ]
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    worker = [sys.executable, "tests/support/security_worker.py", str(tmp_path / "commands.json")]
    done = warm_python.run(worker, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "--- sample 1 ---" in done.stdout and "Resuming from" in done.stdout
    only_its_own = ["socket.connect ('192.0.2.1', 443)"]  # which shows that it would see one
    assert json.loads(done.stdout.splitlines()[-1]) == only_its_own


# --- 27: two runs in one out_dir ---


def wait_for(process, text: str, timeout: float = HANG_S) -> None:
    shown, until = "", time.monotonic() + timeout
    while text not in shown:
        ready, _, _ = select.select([process.stdout], [], [], max(0, until - time.monotonic()))
        part = os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace") if ready else ""
        assert part, f"{text!r} did not come: {shown[-2000:]}"
        shown += part


@pytest.mark.one_run
def test_second_run_in_an_out_dir_refuses_naming_the_first_which_goes_on(run, config, tmp_path, capfd):
    """And once the first is killed, a new one starts at once, though data workers of the first are still
    there."""
    out_dir = tmp_path / "out"
    endless = ("--max_iters=1000000", "--always_save_checkpoint=False", "--use_dataloader=True")
    first = start_train(config, *endless)
    try:
        wait_for(first, "📍 Iter      1")
        before = sorted(path.name for path in out_dir.iterdir())
        assert run(config, "--max_iters=1") == 2
        error = capfd.readouterr().err
        assert f"is in use by process {first.pid} on " in error and "choose another --out_dir" in error
        assert sorted(path.name for path in out_dir.iterdir()) == before, "it has left nothing there"
        os.read(first.stdout.fileno(), 1 << 20)
        wait_for(first, "📍 Iter")
        assert run(config, "--eval_only=True", "--eval_interval=1") == 0, "it writes its own record alone"
        os.kill(first.pid, signal.SIGKILL)  # not its workers
        first.wait()
        assert f"{first.pid} on " in (out_dir / run_lock.NAME).read_text(), "which stops nobody"
        assert run(config, "--max_iters=1") == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)  # the workers, too
        first.communicate()
