"""The record over several attempts at a run: whatever kills it, no row is lost or
there twice; and what cannot be written does not end a run."""

import errno
import io
import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.helpers import last_run
from support.records import add_row, add_rows, iterations, journal_of, row

from common.errors import RunError
from common.run_records import load_record
from training.process import console
from training.process.console import start_logging
from training.records import run_record as record_module
from training.records.attempts import find_history
from training.records.run_record import RunRecord

pytestmark = pytest.mark.history


NAME = "run_20250101_000000"


def read(path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture
def attempt(tmp_path):
    """attempt(number, run_before, start): the record of an attempt that carries on the one that is named."""

    def attempt(number: int, run_before: str | None = None, start: int = 0, launch=None) -> RunRecord:
        history = find_history(tmp_path, run_before, launch)
        path = tmp_path / f"run_20260101_{number:06d}.json"
        info = {"resumed_from": run_before and f"step-{start:08d}", "launch": launch}
        content = RunRecord(path, {}, info, True, history, start)
        content.save()
        return content

    return attempt


def rows_found(content: RunRecord) -> list[int]:
    """The iterations that a next attempt would find of this one."""
    found = find_history(content.path.parent, content.path.stem, None)
    rows = iterations(found["training_iterations"])
    assert iterations(found["training_progress"]) == rows
    return rows


# --- killed ---


def test_rows_that_the_json_does_not_have_yet_are_in_the_journal_and_a_cut_line_spoils_none(attempt):
    content = attempt(1)
    content.save_not_before = time.monotonic() + 60
    add_rows(content, 0, 2)
    content.save()
    assert read(content.path)["training_iterations"] == [] and rows_found(content) == [0, 1]
    assert load_record(content.path) == content.content, "what plots read of a run that goes on"
    with open(journal_of(content), "ab") as journal:
        journal.write(b'{"training_iterations": {"iter": 2, "mfu": {"mfu": 0.5}')
    assert rows_found(content) == [0, 1]
    add_rows(content, 2, 3)
    assert rows_found(content) == [0, 1, 2]


def test_kill_between_the_last_rendering_and_the_removal_of_the_journal_counts_nothing_twice(attempt):
    content = attempt(1)
    add_rows(content, 0, 3)
    lines = journal_of(content).read_bytes()
    content.close("completed", {})
    assert not journal_of(content).exists()
    journal_of(content).write_bytes(lines)
    assert rows_found(content) == [0, 1, 2] and load_record(content.path)["status"] == "completed"


def test_an_attempt_s_journal_has_all_of_the_attempts_before_at_once(attempt):
    """Whoever removes the other files loses nothing."""
    first = attempt(1)
    add_rows(first, 0, 8)
    for number, start in ((2, 6), (3, 4)):
        content = attempt(number, first.path.stem, start=start)
        content.add_event(start, "test")
    for path in first.path.parent.glob("run_*1.*"):
        path.unlink()
    found = load_record(content.path)
    assert iterations(found["training_iterations"]) == list(range(4)) and iterations(found["events"]) == [4]
    lost = {section: iterations(entries) for section, entries in found["superseded"].items()}
    assert lost == {"training_iterations": [6, 7, 4, 5], "training_progress": [6, 7, 4, 5], "events": [6]}
    assert [each["status"] for each in found["attempts"]] == ["killed", "killed", "running"]


def test_a_journal_of_an_earlier_version_has_what_its_json_lacks(tmp_path):
    old = {"run_name": NAME, "status": "running", "startup_info": {}, "journal_lines": 1}
    (tmp_path / f"{NAME}.json").write_text(json.dumps({**old, "training_iterations": [row(0)]}))
    lines = [{"line": i, "section": "training_iterations", "entry": row(i, attempt=1)} for i in range(3)]
    text = "".join(f"\n{json.dumps(line)}" for line in lines)
    (tmp_path / f"{NAME}.jsonl").write_text(text + '\n{"line": 3, "sect')
    assert iterations(find_history(tmp_path, NAME, None)["training_iterations"]) == [0, 1, 2]


# --- carried on ---


def test_overlap_is_superseded_and_what_the_checkpoint_holds_is_kept(attempt, tmp_path):
    first = attempt(1)
    add_rows(first, 0, 8)
    for iteration in (3, 6):
        for section in ("eval_steps", "checkpoints"):
            first.add(section, {"iter": iteration, "val_loss": 1.0})
    first.add_event(2, "skipped")
    first.add_event(5, "skipped")
    second = attempt(2, first.path.stem, start=3)
    add_rows(second, 3, 5)
    second.close("completed", {})
    content = read(second.path)

    rows = content["training_iterations"]
    assert [(entry["iter"], entry["attempt"]) for entry in rows] == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2)]
    assert iterations(content["eval_steps"]) == iterations(content["checkpoints"]) == [3]
    assert iterations(content["events"]) == [2]
    lost = {section: iterations(entries) for section, entries in content["superseded"].items()}
    assert lost["training_iterations"] == lost["training_progress"] == [3, 4, 5, 6, 7]
    assert lost["eval_steps"] == lost["checkpoints"] == [6] and lost["events"] == [5]
    assert content["attempt"] == 2
    assert [(a["run_name"], a["status"], a["start_iter"]) for a in content["attempts"]] == [
        (first.path.stem, "killed", 0),
        (second.path.stem, "completed", 3),
    ]


def test_attempt_that_died_before_its_first_checkpoint_is_not_forgotten(attempt):
    """The checkpoint is the first attempt's, the newest record that knows of it the second's."""
    first = attempt(1)
    add_rows(first, 0, 10)
    second = attempt(2, first.path.stem, start=10)
    add_rows(second, 10, 15)
    third = attempt(3, first.path.stem, start=10)
    assert third.attempt == 3 and iterations(third.content["training_iterations"]) == list(range(10))
    assert iterations(third.content["superseded"]["training_iterations"]) == list(range(10, 15))


def test_run_from_scratch_in_the_same_folder_is_no_part_of_the_history(attempt):
    first = attempt(1)
    add_rows(first, 0, 10)
    other = attempt(2)  # from scratch; ended before it saved, so the newest checkpoint is still the first's
    add_rows(other, 0, 3)
    third = attempt(3, first.path.stem, start=10)
    assert [each["run_name"] for each in third.content["attempts"]] == [first.path.stem, third.path.stem]
    assert other.content["attempt"] == 1


def test_restart_by_torchrun_before_the_first_checkpoint_is_an_attempt_too(attempt):
    first = attempt(1, launch={"id": "job-7", "restarts": 0})
    add_rows(first, 0, 3)
    second = attempt(2, launch={"id": "job-7", "restarts": 1})
    assert second.attempt == 2 and list(second.content["training_iterations"]) == []
    assert iterations(second.content["superseded"]["training_iterations"]) == [0, 1, 2]
    assert second.content["attempts"][-1]["restarts"] == 1
    assert attempt(3, launch={"id": "job-8", "restarts": 1}).attempt == 1


def test_record_of_an_older_version_is_carried_on(attempt, tmp_path):
    old = {"run_name": "run_20250101_000000", "status": "running", "startup_info": {}}
    old |= {"training_iterations": [row(0), row(10)], "eval_steps": []}
    flat = [{"iter": 0, "loss": 1.0, "mfu": None}, {"iter": 4, "loss": 1.0, "mfu": 0.5}]
    old["training_progress"] = flat  # without an MFU: those of today have no such rows
    (tmp_path / "run_20250101_000000.json").write_text(json.dumps(old))
    content = attempt(1, "run_20250101_000000", start=5).content
    assert content["attempt"] == 2 and [
        (e["iter"], e["attempt"]) for e in content["training_iterations"]
    ] == [(0, 1)]
    assert iterations(content["training_progress"]) == [4]


def test_name_of_a_run_in_a_checkpoint_leads_nowhere_else(tmp_path):
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    outside = {"run_name": "secret", "startup_info": {}, "training_iterations": [row(0)]}
    (tmp_path / "secret.json").write_text(json.dumps(outside))
    assert find_history(out_dir, "../secret", None) is None
    assert find_history(out_dir, ["../secret"], None) is None


def test_resumed_training_has_the_whole_run_in_its_record(run, config, out):
    assert run(config, "--max_iters=6", "--eval_interval=4", "--keep_last=None") == 0
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    first = last_run(out)
    assert run(config, "--max_iters=9", "--eval_interval=4", "--init_from=resume") == 0
    second = last_run(out)
    rows = second["training_iterations"]
    assert [(r["iter"], r["attempt"]) for r in rows] == [(i, 1 + (i >= 4)) for i in range(9)]
    assert iterations(second["superseded"]["training_iterations"]) == [4, 5]
    assert rows[:4] == first["training_iterations"][:4]
    assert [r["loss"] for r in rows[4:6]] == [r["loss"] for r in second["superseded"]["training_iterations"]]
    assert second["attempts"][0]["run_name"] == first["run_name"]
    assert second["attempts"][1]["resumed_from"] == str(out / "checkpoints" / "step-00000004")
    assert second["summary"]["rows_after_warmup"] == 0, "of this attempt's 5 iterations"
    # an evaluation beside it is not another attempt
    assert run(config, "--init_from=resume", "--eval_only=True") == 0
    (path,) = out.glob("eval_*.json")
    assert read(path)["attempt"] == 1 and read(path)["training_iterations"] == []
    assert last_run(out) == second


# --- the cost ---


def test_rewriting_the_json_takes_one_percent_of_the_time_however_often_it_is_asked_for(attempt, monkeypatch):
    content, rewrites, replace = attempt(1), [], record_module.replace_file
    clock = SimpleNamespace(now=0.0, sleep=lambda seconds: None)
    clock.monotonic = lambda: clock.now

    def slowly(path, text, temporary):
        rewrites.append(clock.now)
        clock.now += 1  # seconds
        replace(path, text, temporary)

    monkeypatch.setattr(record_module, "replace_file", slowly)
    monkeypatch.setattr(record_module, "time", clock)
    content.save_not_before = 0.0
    while clock.now < 250:
        content.save()
        clock.now += 0.5
    assert rewrites == [0, 101, 202]
    content.close("completed", {})
    assert len(rewrites) == 4, "the end is always written"


# --- nowhere to write ---


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


class Full(io.StringIO):
    write = full_disk


def logging_to(path, monkeypatch, stdout):
    monkeypatch.setattr(sys, "stdout", stdout)
    start_logging(path)
    return logging.getLogger("nanomfu")


def test_full_disk_under_the_log_is_one_warning_and_later_messages_are_written(tmp_path, monkeypatch, capfd):
    path = tmp_path / "run.log"
    log = logging_to(path, monkeypatch, io.StringIO())
    log.info("before")
    with monkeypatch.context() as patch:
        patch.setattr(console.os, "write", full_disk)
        for i in range(5):
            log.info("lost %d", i)
    log.info("after")
    assert path.read_text() == "before\nafter\n"
    assert capfd.readouterr().err.count("No space left on device") == 1


def test_console_that_takes_nothing_more_does_not_end_the_run(tmp_path, monkeypatch, capfd):
    log = logging_to(tmp_path / "run.log", monkeypatch, Full())
    log.info("one")
    log.info("two")
    assert (tmp_path / "run.log").read_text() == "one\ntwo\n"
    assert capfd.readouterr().err.count("could not write to the console") == 1


def filled(content: RunRecord) -> None:
    """From here on, the journal takes half of each line."""
    file = content.journal
    methods = {name: getattr(file, name) for name in ("fileno", "truncate", "seek", "readall")}
    content.journal = SimpleNamespace(**methods, write=lambda line: file.write(line[: len(line) // 2]))
    content.filled = file


def test_full_disk_under_the_record_is_one_warning_and_is_tried_again(attempt, monkeypatch, caplog):
    content = attempt(1)
    with monkeypatch.context() as patch:
        patch.setattr(record_module, "replace_file", full_disk)
        filled(content)
        for iteration in range(5):
            add_row(content, row(iteration))
            content.save(at_once=True)
            assert rows_found(content) == []
    assert len(caplog.records) == 1 and "it is tried again" in caplog.text
    content.journal = content.filled
    add_row(content, row(5))
    assert rows_found(content) == list(range(6))
    content.save(at_once=True)
    assert iterations(read(content.path)["training_iterations"]) == list(range(6))


def test_while_a_run_goes_on_its_json_has_no_row_that_its_journal_lacks(attempt):
    """Readers of a run that goes on read the journal alone."""
    content = attempt(1)
    filled(content)
    add_row(content, row(0))
    content.save(at_once=True)
    assert read(content.path)["training_iterations"] == []


def test_a_disk_that_is_full_at_the_start_takes_everything_later(attempt, tmp_path, monkeypatch, caplog):
    add_rows(first := attempt(1), 0, 3)
    with monkeypatch.context() as patch:
        patch.setattr(record_module, "replace_file", full_disk)
        content = attempt(2, first.path.stem, start=3)
        add_rows(content, 3, 5)
    assert len(caplog.records) == 1 and not journal_of(content).exists()
    content.save(at_once=True)
    assert rows_found(content) == iterations(read(content.path)["training_iterations"]) == list(range(5))


@pytest.mark.parametrize("failures", [1, 100])
def test_a_record_that_cannot_be_renamed_is_tried_again_and_then_a_failure(
    failures, run, config, out, monkeypatch, capfd
):
    """From its last rewrite on. The journal keeps what the JSON lacks, and a resume has all of it."""
    replace, left = os.replace, []

    def fails(source, target):
        if Path(target).match("run_*.json") and json.loads(Path(source).read_text())["end_time"]:
            left.append(target)
            if len(left) <= failures:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    assert run(config, "--log_save_interval=1000") == (failures > 1)
    (path,) = out.glob("run_*.json")
    assert iterations(find_history(out, path.stem, None)["training_iterations"]) == list(range(4))
    said = capfd.readouterr()
    assert "it is tried again" in said.out and ("could not be completed" in said.err) == (failures > 1)


def test_rows_that_neither_the_json_nor_the_journal_has_are_counted_as_lost(attempt, monkeypatch):
    content = attempt(0)
    add_row(content, row(2))
    filled(content)
    monkeypatch.setattr(record_module, "replace_file", full_disk)
    monkeypatch.setattr(record_module, "FINAL_PAUSES_S", (0.0,))
    add_row(content, row(3))
    lost = "run_.*jsonl beside it has its rows, for the next resume; 3 lines are lost"  # with what ended it
    with pytest.raises(RunError, match=lost):
        content.close("completed", {})


# --- what a fault cost ---


def test_the_next_attempt_says_what_the_end_of_the_one_before_cost(attempt):
    first = attempt(1)
    for i in (0, 10, 20, 30):  # log_interval=10
        add_row(first, row(i))
    second = attempt(2, first.path.stem, start=15)
    found = second.this_attempt["recovery"]
    assert (found["iterations_repeated"], found["seconds_to_first_row"]) == (16, None)
    assert found["seconds_repeated"] == pytest.approx(16 * 0.005)
    assert found["last_row_time"] == first.content["training_iterations"][-1]["time"]
    add_row(second, row(15))
    seconds = found["seconds_to_first_row"]
    assert 0 <= seconds < 60
    add_row(second, row(20))
    assert found["seconds_to_first_row"] == seconds and "recovery" in read(first.path)["attempts"][0]


@pytest.mark.parametrize("value", [None, 5, "yesterday", "2026-01-01T00:00:00"])
@pytest.mark.parametrize("key", ["time", "time_ms"])
def test_a_time_that_no_run_writes_ends_nothing(attempt, key, value):
    first = attempt(1)
    add_row(first, row(0))
    first.close("failed", {})
    content = read(first.path)
    content["training_iterations"][0][key] = value
    first.path.write_text(json.dumps(content))
    second = attempt(2, first.path.stem, start=0)
    add_row(second, row(0))
    found = second.this_attempt["recovery"]
    assert found["iterations_repeated"] == 1
    assert found["seconds_to_first_row"] is None if key == "time" else 0 <= found["seconds_repeated"] < 1
