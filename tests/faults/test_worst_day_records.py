"""The worst day of a run record: a resume reads one that no run would have written. Its rows are left out,
and the run makes a record of its own."""

import json
import re
from pathlib import Path

import pytest
from support.hostile_files import DEEP, no_hang, replace  # noqa: F401 - no_hang is a fixture

from training.records.attempts import find_history
from training.records.run_record import RunRecord

RECORD = {"run_name": "run_1", "status": "running", "startup_info": {}, "attempt": 1}
ROW = {"iter": 0, "loss": 1.0, "attempt": 1, "time_ms": 1.0}
UNUSABLE = [
    {**RECORD, "training_iterations": {}},
    {**RECORD, "training_iterations": [7]},
    {**RECORD, "training_iterations": [{"iter": "0"}]},
    {**RECORD, "training_iterations": [{**ROW, "iter": True}]},
    {**RECORD, "training_iterations": [{**ROW, "attempt": 2}]},
    {**RECORD, "training_iterations": [{**ROW, "loss": json.loads(DEEP)}]},
    {**RECORD, "superseded": {"events": [7]}},
    {**RECORD, "superseded": []},
    {**RECORD, "attempts": [7]},
    {**RECORD, "attempts": [{"run_name": ["run_1"]}]},
    {**RECORD, "attempts": [{"run_name": "a\0b"}]},
    {**RECORD, "attempts": "run_1"},
    {**RECORD, "startup_info": []},
    {**RECORD, "journal_lines": "0"},
]


@pytest.mark.parametrize("content", UNUSABLE, ids=lambda content: str(content)[70:110])
def test_a_record_that_a_run_would_not_write_is_left_out(tmp_path, content):
    (tmp_path / "run_1.json").write_text(json.dumps(content))
    continue_run(tmp_path, expected_attempt=1)


@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link"])
@pytest.mark.parametrize("name", ["run_1.json", "run_1.jsonl"])
def test_a_record_or_journal_that_is_a_special_file_is_left_out(tmp_path, name, kind):
    for path in (tmp_path / "run_1.json", tmp_path / "run_1.jsonl"):
        path.write_text(json.dumps(RECORD) if path.suffix == ".json" else "")
    replace(tmp_path / name, kind)
    continue_run(tmp_path, expected_attempt=1 if name == "run_1.json" else 2)


def test_a_journal_of_other_things_is_left_out(tmp_path):
    (tmp_path / "run_1.json").write_text(json.dumps(RECORD))
    line = {"line": 0, "section": "events", "entry": {"iter": 0, "attempt": 1}}
    lines = [
        "7",
        "[" * 100_000,
        json.dumps({**line, "entry": 7}),
        json.dumps({**line, "section": []}),
        json.dumps({**line, "line": None}),
        json.dumps({**line, "entry": {"iter": 0, "attempt": 1, "x": json.loads(DEEP)}}),
        json.dumps(line),
    ]
    (tmp_path / "run_1.jsonl").write_text("\n".join(lines))
    record = continue_run(tmp_path, expected_attempt=2)
    assert record["events"] == [{"iter": 0, "attempt": 1}]


def test_numbers_that_json_lacks_are_null_in_the_next_record(tmp_path):
    row = {**ROW, "loss": float("nan")}
    (tmp_path / "run_1.json").write_text(json.dumps({**RECORD, "training_iterations": [row]}))
    assert continue_run(tmp_path, expected_attempt=2)["training_iterations"] == [{**row, "loss": None}]


def continue_run(out_dir: Path, expected_attempt: int) -> dict:
    """The record of an attempt that continues run_1 from iteration 1."""
    launch = {"id": "job", "restarts": 1}
    assert find_history(out_dir, None, launch) is None, "torchrun has started none of these"
    record = RunRecord(out_dir / "run_2.json", {}, {}, True, find_history(out_dir, "run_1", launch), 1)
    record.finish("completed", {})
    text = (out_dir / "run_2.json").read_text()
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["attempt"] == expected_attempt
    assert not re.search("NaN|Infinity", text)
    return content
