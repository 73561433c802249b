"""What the tests of the run record share: rows, and the entries of a record."""

from pathlib import Path

from training.records.rows import flat_row
from training.records.run_record import RunRecord


def row(iteration: int, **more) -> dict:
    facts = {"loss": 1.0, "time_ms": 5.0, "tokens_per_sec": 1.0, "mfu": {"mfu": 0.5}, "memory": None}
    return {"iter": iteration, **facts, **more}


def add_row(record: RunRecord, found: dict) -> None:
    """As a log row is added."""
    record.add("training_iterations", found)
    if flat := flat_row(found):
        record.add("training_progress", flat)


def add_rows(record: RunRecord, start: int, end: int) -> None:
    for iteration in range(start, end):
        add_row(record, row(iteration))


def iterations(entries: list[dict]) -> list[int]:
    return [entry["iter"] for entry in entries]


def journal_of(record: RunRecord) -> Path:
    return record.path.with_suffix(".jsonl")
