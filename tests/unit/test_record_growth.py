"""What a row of the run record costs, in bytes, calls and memory: in a long run the same as in a short one.
And a long record is carried over whole."""

import json
import time

import pytest
from support.records import add_row, add_rows, iterations, journal_of, row

from common import json_file
from training.records import run_record as record_module
from training.records.attempts import find_history
from training.records.run_record import RunRecord

pytestmark = pytest.mark.history

NAME = "run_20260101_000001"


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Time never keeps it from a rewrite here."""
    monkeypatch.setattr(record_module, "SAVING_SHARE", float("inf"))
    return RunRecord(tmp_path / f"{NAME}.json", {}, {"launch": None}, True)


@pytest.fixture
def written(monkeypatch):
    """The bytes of each rendering of the JSON."""
    sizes: list[int] = []
    replace = record_module.replace_file

    def noting(path, text, temporary):
        replace(path, text, temporary)
        if path.suffix == ".json":
            sizes.append(path.stat().st_size)

    monkeypatch.setattr(record_module, "replace_file", noting)
    return sizes


# --- the cost of a row ---


def test_all_renderings_write_a_bounded_multiple_of_the_last_one(record, written):
    for iteration in range(2000):
        add_row(record, row(iteration))
        record.save()
    assert sum(written) < 110 * written[-1]
    half = len(written) // 2
    assert len(written) < 1000 and written[half] < written[-1] / 3, "longer and longer intervals"


def with_200_000_rows(record) -> None:
    add_row(record, row(0))
    lines = journal_of(record).read_bytes().splitlines(keepends=True)[-2:]
    with open(journal_of(record), "ab") as journal:
        journal.writelines(lines * 200_000)
    record.written, record.count = journal_of(record).stat().st_size, 400_002
    record.save(at_once=True)


def test_after_200_000_rows_a_row_costs_what_the_first_one_costs(record, written):
    record.save()
    sizes = []
    for _ in range(2):
        before = journal_of(record).stat().st_size
        add_row(record, row(7))
        sizes.append(journal_of(record).stat().st_size - before)
        if len(sizes) == 1:
            with_200_000_rows(record)
            del written[:]
    record.save()
    assert written == [], "400,000 entries are not rendered again for two more"
    assert abs(sizes[0] - sizes[1]) < 10


def test_to_render_200_000_rows_parses_none_of_them(record, monkeypatch):
    with_200_000_rows(record)
    monkeypatch.setattr(json, "loads", lambda text, loads=json.loads: len(text) < 2000 and loads(text))
    began = time.process_time()
    record.save(at_once=True)
    assert time.process_time() - began < 4
    monkeypatch.undo()
    assert len(json.loads(record.path.read_bytes())["training_iterations"]) == 200_001


# --- whole at every moment, and at the end ---


def found(record) -> list[int]:
    return iterations(find_history(record.path.parent, NAME, None)["training_iterations"])


def test_a_kill_after_any_row_leaves_a_whole_json_and_a_journal_with_the_rest(record):
    for iteration in range(250):
        add_row(record, row(iteration))
        record.save()
        whole = json.loads(record.path.read_bytes())
        rows = len(whole["training_iterations"])
        assert rows >= 0.98 * iteration and len(whole["training_progress"]) == rows
        assert found(record) == list(range(iteration + 1))


def test_a_kill_within_any_line_of_the_journal_loses_that_line_alone(record):
    record.save()
    record.save_not_before = time.monotonic() + 60
    add_rows(record, 0, 6)
    content = journal_of(record).read_bytes()
    for end in range(0, len(content), 5):
        journal_of(record).write_bytes(content[:end])
        complete = sum(b"training_iterations" in line for line in content[:end].split(b"\n")[:-1])
        assert found(record) == list(range(complete))


@pytest.mark.parametrize("status", ["completed", "interrupted", "failed"])
def test_at_the_end_the_json_has_every_row_and_there_is_no_journal(record, status):
    for iteration in range(300):
        add_row(record, row(iteration))
        record.save()
    add_row(record, row(300))
    record.save()
    assert journal_of(record).stat().st_size, "a rewrite is not due"
    record.close(status, {})
    assert not journal_of(record).exists()
    content = json.loads(record.path.read_bytes())
    assert content["status"] == status and iterations(content["training_iterations"]) == list(range(301))


# --- a resume ---


def test_a_record_above_the_limit_of_other_files_is_carried_over_whole(record, monkeypatch):
    add_rows(record, 0, 400)
    record.close("completed", {})
    monkeypatch.setattr(json_file, "MAX_BYTES", 20_000)
    assert record.path.stat().st_size > 60_000 and found(record) == list(range(400))


@pytest.mark.parametrize("indent", [None, 1, 2])
def test_a_record_that_another_program_wrote_is_read_in_any_layout(record, indent):
    add_rows(record, 0, 3)
    record.close("completed", {})
    content = json.loads(record.path.read_bytes())
    record.path.write_text(json.dumps(content, indent=indent))
    history = find_history(record.path.parent, NAME, None)
    assert history == content
