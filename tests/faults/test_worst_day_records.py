"""The worst day of a run record: a resume reads one that no run would have written. Its rows are left out,
and the run makes a record of its own."""

import json
import re
from pathlib import Path

import pytest
from support.hostile_files import DEEP, no_hang, pairs, replace  # noqa: F401 - no_hang is a fixture

from training.records.attempts import find_history
from training.records.run_record import RunRecord

RECORD = {"run_name": "run_1", "status": "running", "startup_info": {}, "attempt": 1}
ROW = {"iter": 0, "loss": 1.0, "attempt": 1, "time_ms": 1.0}
UNUSABLE = {
    "training_iterations": [
        *(7, [7], [{"iter": "0"}], [{**ROW, "iter": True}], [{**ROW, "attempt": 2}]),
        [{**ROW, "loss": json.loads(DEEP)}],
    ],
    "superseded": [{"events": [7]}, []],
    "attempts": [[7], [{"run_name": ["run_1"]}], [{"run_name": "a\0b"}], "run_1"],
    "startup_info": [[], ...],
}
NO_RECORDS = ["", "[]", "{", "[" * 100_000]


@pytest.mark.parametrize("content", [*NO_RECORDS, *pairs(UNUSABLE)], ids=lambda content: str(content)[:40])
def test_a_record_that_a_run_would_not_write_is_left_out_and_left_alone(tmp_path, content):
    if isinstance(content, tuple):
        fields = RECORD | dict([content])
        content = json.dumps({name: value for name, value in fields.items() if value is not ...})
    (tmp_path / "run_1.json").write_text(content)
    continue_run(tmp_path, expected_attempt=1)
    assert (tmp_path / "run_1.json").read_text() == content


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
@pytest.mark.parametrize("name", ["run_1.json", "run_1.jsonl"])
def test_a_record_or_journal_that_is_a_special_file_is_left_out(tmp_path, name, kind):
    for path in (tmp_path / "run_1.json", tmp_path / "run_1.jsonl"):
        path.write_text(json.dumps(RECORD) if path.suffix == ".json" else "")
    replace(tmp_path / name, kind)
    continue_run(tmp_path, expected_attempt=1 if name == "run_1.json" else 2)


def test_a_journal_of_other_things_is_left_out(tmp_path):
    (tmp_path / "run_1.json").write_text(json.dumps(RECORD))
    entry = {"iter": 0, "attempt": 1}
    line = {"line": 0, "section": "events", "entry": entry}
    wrong = [{"entry": 7}, {"section": []}, {"line": None}, {"entry": {**entry, "x": json.loads(DEEP)}}, {}]
    lines = ["7", "[" * 100_000, "{}", *(json.dumps({**line, **fields}) for fields in wrong)]
    (tmp_path / "run_1.jsonl").write_text("\n".join(lines))
    assert continue_run(tmp_path, expected_attempt=2)["events"] == [entry]


def test_numbers_that_json_lacks_are_null_in_the_next_record(tmp_path):
    row = {**ROW, "loss": float("nan")}
    (tmp_path / "run_1.json").write_text(json.dumps({**RECORD, "training_iterations": [row]}))
    assert continue_run(tmp_path, expected_attempt=2)["training_iterations"] == [{**row, "loss": None}]


def continue_run(out_dir: Path, expected_attempt: int) -> dict:
    """The record of an attempt that continues run_1 from iteration 1."""
    launch = {"id": "job", "restarts": 1}
    assert find_history(out_dir, None, launch) is None, "torchrun has started none of these"
    record = RunRecord(out_dir / "run_2.json", {}, {}, True, find_history(out_dir, "run_1", launch), 1)
    record.close("completed", {})
    text = (out_dir / "run_2.json").read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["attempt"] == expected_attempt
    assert not re.search("NaN|Infinity", text)
    return content
