"""What a row of the run record costs, in bytes, calls and memory: in a long run the same as in a short one.
And a long record is carried over whole."""

import json
import os
import time
import tracemalloc
from types import SimpleNamespace

import pytest

from training.records import attempts as attempts_module
from training.records import run_record as record_module
from training.records.attempts import find_history, journal_path
from training.records.run_record import RunRecord

pytestmark = pytest.mark.history

NAME = "run_20260101_000001"


def row(iteration: int, **more) -> dict:
    facts = {"loss": 1.0, "time_ms": 5.0, "tokens_per_sec": 1.0, "mfu": {"mfu": 0.5}, "memory": None}
    return {"iter": iteration, **facts, **more}


def iterations(entries) -> list[int]:
    return [entry["iter"] for entry in entries]


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Time never keeps it from a rewrite here."""
    monkeypatch.setattr(record_module, "SAVING_SHARE", float("inf"))
    return RunRecord(tmp_path / f"{NAME}.json", {}, {"launch": None}, True)


@pytest.fixture
def written(monkeypatch):
    """The bytes of each rewrite, which goes nowhere."""
    sizes: list[int] = []
    monkeypatch.setattr(record_module, "_replace", lambda path, text: sizes.append(sum(map(len, text))))
    return sizes


def count(monkeypatch, name: str) -> list:
    """The arguments of each call of this function of run_record.py."""
    calls, original = [], getattr(record_module, name)
    monkeypatch.setattr(record_module, name, lambda *args: (calls.append(args), original(*args))[1])
    return calls


# --- the cost of a row ---


def test_all_rewrites_write_a_bounded_multiple_of_the_last_one(record, written):
    for iteration in range(5000):
        record.add_iteration(row(iteration))
        record.save()
    assert sum(written) < 110 * written[-1]
    half = len(written) // 2
    assert len(written) < 1100 and written[half] < written[-1] / 5, "longer and longer intervals"


def with_200_000_rows(record) -> None:
    record.add_iteration(row(0))
    for section in ("training_iterations", "training_progress"):
        record.content[section].lines *= 200_000
    record.save(at_once=True)


def test_after_200_000_rows_a_row_costs_what_the_first_one_costs(record, written, monkeypatch):
    lines = count(monkeypatch, "to_line")
    costs = []
    for _ in range(2):
        before, already = os.path.getsize(journal_path(record.path)) if costs else 0, len(lines)
        record.add_iteration(row(7))
        size = os.path.getsize(journal_path(record.path)) - before
        costs.append((size, len(lines) - already))
        if len(costs) == 1:
            with_200_000_rows(record)
            del written[:]
    record.save()
    assert written == [], "400,000 entries are not written again for two more"
    (first, calls), (last, calls_then) = costs
    assert calls == calls_then == 2 and abs(first - last) < 10


def test_a_rewrite_of_200_000_rows_makes_no_entry_s_text_again_and_needs_no_memory(record, monkeypatch):
    with_200_000_rows(record)
    lines = count(monkeypatch, "to_line")
    tracemalloc.start()
    record.save(at_once=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(lines) == 1 and peak < 1e6, "of what is superseded alone"
    began = time.process_time()
    record.save(at_once=True)
    assert time.process_time() - began < 3
    assert len(json.loads(record.path.read_bytes())["training_iterations"]) == 200_000


# --- whole at every moment, and at the end ---


def found(record) -> list[int]:
    return iterations(find_history(record.path.parent, NAME, None)["training_iterations"])


def test_a_kill_after_any_row_leaves_a_whole_json_and_a_journal_with_the_rest(record):
    for iteration in range(250):
        record.add_iteration(row(iteration))
        record.save()
        whole = json.loads(record.path.read_bytes())
        rows = len(whole["training_iterations"])
        assert rows >= 0.98 * iteration and len(whole["training_progress"]) == rows
        assert found(record) == list(range(iteration + 1))


def test_a_kill_within_any_line_of_the_journal_loses_that_line_alone(record):
    record.save()
    record.save_not_before = time.monotonic() + 60
    for iteration in range(6):
        record.add_iteration(row(iteration))
    content = journal_path(record.path).read_bytes()
    for end in range(0, len(content), 5):
        journal_path(record.path).write_bytes(content[:end])
        complete = sum(b"training_iterations" in line for line in content[:end].split(b"\n")[:-1])
        assert found(record)[:complete] == list(range(complete)) and len(found(record)) <= complete + 1


@pytest.mark.parametrize("status", ["completed", "interrupted", "failed"])
def test_at_the_end_the_json_has_every_row_and_there_is_no_journal(record, status):
    for iteration in range(300):
        record.add_iteration(row(iteration))
        record.save()
    record.add_iteration(row(300))
    record.save()
    assert journal_path(record.path).stat().st_size, "a rewrite is not due"
    record.finish(status, {})
    assert not journal_path(record.path).exists()
    content = json.loads(record.path.read_bytes())
    assert content["status"] == status and iterations(content["training_iterations"]) == list(range(301))


def test_rows_that_the_journal_could_not_take_are_reason_enough_for_a_rewrite(record, written):
    for iteration in range(300):
        record.add_iteration(row(iteration))
    record.save()
    full = {"write": lambda line: len(line) // 2, "truncate": abs, "seek": abs}
    record.journal.file = SimpleNamespace(**full)
    record.add_event(300, "test")
    record.save()
    assert len(written) == 2 and record.journal.lost == 0


# --- a resume ---


def test_a_record_and_a_journal_above_the_limit_of_other_files_are_carried_over_whole(record, monkeypatch):
    for iteration in range(400):
        record.add_iteration(row(iteration))
    record.save(at_once=True)
    record.save_not_before = time.monotonic() + 60
    for iteration in range(400, 800):
        record.add_iteration(row(iteration))
    limit = 20_000
    assert min(record.path.stat().st_size, journal_path(record.path).stat().st_size) > 3 * limit
    monkeypatch.setattr(attempts_module, "MAX_BYTES", limit)
    assert found(record) == list(range(800))


def test_what_is_no_row_has_a_limit(record, monkeypatch, caplog):
    record.content["startup_info"]["note"] = 30_000 * "x"
    record.save(at_once=True)
    monkeypatch.setattr(attempts_module, "MAX_BYTES", 20_000)
    assert find_history(record.path.parent, NAME, None) is None
    assert "more than 20,000 bytes that are not rows" in caplog.text


def test_reading_a_record_takes_the_memory_of_its_entries_alone(record):
    for iteration in range(40):
        record.add_event(iteration, "test", note=500_000 * "x")
    record.save(at_once=True)
    size = record.path.stat().st_size
    tracemalloc.start()
    history = find_history(record.path.parent, NAME, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(history["events"]) == 40 and size < peak < 1.3 * size


@pytest.mark.parametrize("indent", [None, 1, 2])
def test_a_record_that_another_program_wrote_is_read_in_any_layout(record, indent):
    for iteration in range(3):
        record.add_iteration(row(iteration))
    record.finish("completed", {})
    content = json.loads(record.path.read_bytes())
    record.path.write_text(json.dumps(content, indent=indent))
    history = find_history(record.path.parent, NAME, None)
    assert history == content
