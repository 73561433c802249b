"""What a record says of its code: what git does not answer is not known, and never 'not modified'."""

import hashlib
import subprocess

import pytest

from training.records import startup_info
from training.records.startup_info import code_text, git_state


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with one commit and one changed file, in the place of this one."""
    (root := tmp_path / "checkout").mkdir()
    monkeypatch.setattr(startup_info, "ROOT", root)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    (root / "model.py").write_text("1\n")
    me = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "model.py"], [*me, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    (root / "model.py").write_text("2\n")
    return root


def test_a_changed_checkout_is_modified_and_a_clean_one_is_not(checkout):
    changed = git_state()
    assert changed["modified"] is True and len(changed["difference_sha256"]) == 64
    assert code_text(changed) == f"commit {changed['commit']}, modified"
    command = [
        "git",
        "diff",
        "--no-color",
        "--no-ext-diff",
        changed["commit"],
        "--",
    ]
    shown = subprocess.run(command, cwd=checkout, capture_output=True, check=True).stdout
    assert b"+2" in shown and hashlib.sha256(shown).hexdigest() == changed["difference_sha256"]
    (checkout / "model.py").write_text("1\n")
    assert git_state() == {"commit": changed["commit"], "modified": False}
    assert code_text(git_state()) == f"commit {changed['commit']}"


def test_an_index_that_git_cannot_read_is_not_taken_for_no_change(checkout):
    commit = git_state()["commit"]
    (checkout / ".git/index").write_bytes(b"damaged index of more than 32 bytes, with no signature")
    found = git_state()
    assert (found["commit"], found["modified"]) == (commit, None) and "index" in found["reason"]
    assert code_text(found) == f"commit {commit}, perhaps modified ({found['reason']})"


def test_a_checkout_of_another_user_has_its_commit(checkout, monkeypatch):
    known = git_state()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    refused = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr
    assert git_state() == known


def remove_git(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout))


def leave_no_checkout(checkout, monkeypatch):
    (checkout / ".git").rename(checkout / "elsewhere")


def hang(checkout, monkeypatch):
    def run(command, **settings):
        raise subprocess.TimeoutExpired(command, settings["timeout"])

    monkeypatch.setattr(startup_info.subprocess, "run", run)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (remove_git, "'git'"),
        (leave_no_checkout, "not a git repository"),
        (hang, "timed out"),
    ],
)
def test_without_an_answer_the_reason_is_in_the_record(fault, reason, checkout, monkeypatch):
    fault(checkout, monkeypatch)
    found = git_state()
    assert (found["commit"], found["modified"]) == (None, None) and reason in found["reason"]
    assert code_text(found) == f"commit not known ({found['reason']})"
