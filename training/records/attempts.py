"""What earlier attempts at a run left in their records. A resume, or a restart by torchrun, is another
attempt: its record begins with theirs, so that the newest file has the whole run, each iteration once.

The trap is what was done twice. Iterations after the last checkpoint are lost with the attempt that made
them; what their rows say moves to `superseded`, so that whoever reads the lists need not know that the run
was ever stopped.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

SECTIONS = ("training_iterations", "training_progress", "eval_steps", "checkpoints", "events")
# sections whose iteration n happens before update n, and so belongs to a checkpoint of n
BEFORE_THE_UPDATE = ("eval_steps", "checkpoints")

log = logging.getLogger("nanomfu")


def journal_path(record_path: Path) -> Path:
    return record_path.with_suffix(".jsonl")


def find_history(out_dir: Path, run_name: str | None, launch: dict | None) -> dict | None:
    """The record of the attempt before: the newest that carries on the run which wrote the checkpoint or,
    without one, that this same torchrun started. None if there is none; then the history begins here."""
    started_anew = launch if launch and launch["restarts"] else None
    if not run_name and not started_anew:
        return None
    paths = sorted(out_dir.glob("run_*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in paths:
        record = _read(path)
        if record and run_name and _is_part_of(record, run_name):
            return record
        if record and not run_name and started_anew and _started_by(record, started_anew):
            return record
        if not run_name or path.stem == run_name:  # older ones cannot know of it
            break
    return None


def _is_part_of(record: dict, run_name: str) -> bool:
    return run_name in (attempt["run_name"] for attempt in _attempts(record))


def _started_by(record: dict, launch: dict) -> bool:
    return (record["startup_info"].get("launch") or {}).get("id") == launch["id"]


def _read(path: Path) -> dict | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _check(record)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("the rows of earlier attempts are left out: %s cannot be read (%s)", path, error)
        return None
    for section, entry in _journal(journal_path(path), record.get("journal_lines", 0)):
        record[section].append(entry)
    return record


def _check(record: dict) -> None:
    """Raises what indexing raises if it is not a record."""
    _ = record["run_name"], record["startup_info"].get, record.get("journal_lines", 0) + 0
    _ = [attempt["run_name"] for attempt in _attempts(record)], record.get("superseded", {}).items()
    for section in SECTIONS:
        for entry in record.setdefault(section, []):
            entry.setdefault("attempt", 1)
            entry["iter"] + 0


def _journal(path: Path, lines_in_record: int) -> list[tuple[str, dict]]:
    """(section, entry) of each whole line that the record does not have; a kill or a full disk may cut one
    off."""
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
    """{section: entries that a run from iteration `start` on is the continuation of, 'superseded': the
    others by section, 'attempts': one summary each}."""
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
    """A record of an earlier version of this code is one attempt."""
    keys = ("run_name", "start_time", "end_time", "status")
    attempts = record.get("attempts") or [{"attempt": 1, **{key: record.get(key) for key in keys}}]
    last = attempts[-1]
    if last["status"] == "running":  # it is not, or the next could not have begun
        last = {**last, "status": "killed"}
    return [*attempts[:-1], last]
