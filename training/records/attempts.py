"""Carries over the entries of a run's earlier attempts. A resume, or a restart by torchrun, is another
attempt: its record begins with theirs, so that the newest file has the whole run, each iteration once.

The trap is an iteration that was done twice. Iterations after the last checkpoint are lost with the attempt
that made them. Their entries move to `superseded`, so that a reader of the lists need not know that the run
was ever interrupted.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from training.process.redaction import redact

SECTIONS = ("training_iterations", "training_progress", "eval_steps", "checkpoints", "events")
# sections in which iteration n comes before update n, and so belongs to a checkpoint of n
BEFORE_THE_UPDATE = ("eval_steps", "checkpoints")

log = logging.getLogger("nanomfu")


def journal_path(record_path: Path) -> Path:
    return record_path.with_suffix(".jsonl")


def find_history(out_dir: Path, run_name: str | None, launch: dict | None) -> dict | None:
    """The record of the previous attempt: the newest that continues the run which wrote the checkpoint or,
    without a checkpoint, that this same torchrun started. None if there is none: the history begins here."""
    restarted = launch if launch and launch["restarts"] else None
    if not run_name and not restarted:
        return None
    paths = sorted(out_dir.glob("run_*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in paths:
        record = _read(path)
        if record and run_name and _is_part_of(record, run_name):
            return record
        if record and not run_name and restarted and _started_by(record, restarted):
            return record
        if not run_name or path.stem == run_name:  # older records cannot contain it
            break
    return None


def _is_part_of(record: dict, run_name: str) -> bool:
    return run_name in (attempt["run_name"] for attempt in _attempts(record))


def _started_by(record: dict, launch: dict) -> bool:
    # redacted, as it is in the record: the environment is still the same torchrun's
    return (record["startup_info"].get("launch") or {}).get("id") == redact(launch["id"])


def _read(path: Path) -> dict | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _check(record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("the rows of earlier attempts are left out: %s cannot be read (%s)", path, error)
        return None
    for section, entry in _journal(journal_path(path), record.get("journal_lines", 0)):
        record[section].append(entry)
    # earlier versions listed rows without a loss or an MFU there, too
    progress = record["training_progress"]
    record["training_progress"] = [row for row in progress if None not in (row.get("loss"), row.get("mfu"))]
    return record


def _check(record: dict) -> None:
    """Raises the errors of indexing if this is not a record."""
    _ = record["run_name"], record["startup_info"].get, record.get("journal_lines", 0) + 0
    _ = [attempt["run_name"] for attempt in _attempts(record)], record.get("superseded", {}).items()
    for section in SECTIONS:
        for entry in record.setdefault(section, []):
            entry.setdefault("attempt", 1)
            entry["iter"] + 0


def _journal(path: Path, lines_in_record: int) -> list[tuple[str, dict]]:
    """(section, entry) of each complete line that the record does not have. A kill or a full disk may have
    cut one off."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            content = json.loads(line)
            section, entry = content["section"], content["entry"]
            entry["iter"] + entry["attempt"]
            if content["line"] >= lines_in_record and section in SECTIONS:
                found.append((section, entry))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return found


def carry_over(record: dict | None, start: int) -> dict:
    """{section: entries that a run from iteration `start` on continues, 'superseded': the other entries by
    section, 'attempts': one summary of each}."""
    carried: dict[str, list[dict]] = {section: [] for section in SECTIONS}
    if record is None:
        return {**carried, "superseded": {}, "attempts": []}
    superseded = {section: list(entries) for section, entries in record.get("superseded", {}).items()}
    for section in SECTIONS:
        end = start + (section in BEFORE_THE_UPDATE)
        for entry in record[section]:
            target = carried if entry["iter"] < end else superseded
            target.setdefault(section, []).append(entry)
    return {**carried, "superseded": superseded, "attempts": _attempts(record)}


def _attempts(record: dict) -> list[dict]:
    """The attempts in a record. A record of an earlier version of this code is one attempt."""
    keys = ("run_name", "start_time", "end_time", "status")
    attempts = record.get("attempts") or [{"attempt": 1, **{key: record.get(key) for key in keys}}]
    last = attempts[-1]
    if last["status"] == "running":  # no longer: the next attempt has begun
        last = {**last, "status": "killed"}
    return [*attempts[:-1], last]
