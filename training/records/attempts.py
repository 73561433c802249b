"""Carries over the entries of a run's earlier attempts. A resume, or a restart by torchrun, is another
attempt: its record begins with theirs, so that the newest file has the whole run, each iteration once.

The trap is an iteration that was done twice. Iterations after the last checkpoint are lost with the attempt
that made them. Their entries move to `superseded`, so that a reader of the lists need not know that the run
was ever interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.json_file import MAX_BYTES, open_regular, parse_object
from common.run_records import run_records
from training.process.redaction import redact

SECTION = re.compile(rb' "(\w+)": \[\n')  # the line before the entries of one
RUN_NAME = re.compile(r"[\w.-]{1,200}")  # the stem of a record's path
SECTIONS = ("training_iterations", "training_progress", "eval_steps", "checkpoints", "events")
# sections in which iteration n comes before update n, and so belongs to a checkpoint of n
BEFORE_THE_UPDATE = ("eval_steps", "checkpoints")

log = logging.getLogger("nanomfu")


def journal_path(record_path: Path) -> Path:
    return record_path.with_suffix(".jsonl")


def find_history(out_dir: Path, run_name: str | None, launch: dict | None) -> dict | None:
    """The record of the previous attempt: the newest that continues the run which wrote the checkpoint or,
    without a checkpoint, that this same torchrun started. None if there is none: the history begins here."""
    if not run_name and not (launch and launch["restarts"]):
        return None
    for path in sorted(run_records(out_dir), key=_changed_at, reverse=True):
        record = _read(path)
        if record and (_has_attempt(record, run_name) if run_name else _started_by(record, launch)):
            return record
        if not run_name or path.stem == run_name:  # older records cannot contain it
            break
    return None


def _changed_at(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:  # just deleted
        return 0


def _has_attempt(record: dict, run_name: str) -> bool:
    return run_name in (attempt["run_name"] for attempt in _attempts(record))


def _started_by(record: dict, launch: dict | None) -> bool:
    # redacted, as it is in the record: the environment is still the same torchrun's
    found = record["startup_info"].get("launch")
    return launch is not None and isinstance(found, dict) and found.get("id") == redact(launch["id"])


def _read(path: Path) -> dict | None:
    try:
        return read_record(path)
    except (OSError, ValueError) as error:
        log.warning("the rows of earlier attempts are left out: %s cannot be read (%s)", path, error)
        return None


def read_record(path: Path) -> dict:
    """A record with what its journal adds. Raises OSError or ValueError."""
    record = _read_lines(path)
    _check(record)
    attempts = len(_attempts(record))
    for section, entry in _journal(journal_path(path), record.setdefault("journal_lines", 0), attempts):
        record[section].append(entry)
    # earlier versions listed rows without a loss or an MFU there, too
    progress = record["training_progress"]
    record["training_progress"] = [row for row in progress if None not in (row.get("loss"), row.get("mfu"))]
    return record


def _read_lines(path: Path) -> dict:
    """A record of any size, entry by entry if each has a line of its own (run_record.py): as one text, it
    would take ten times its size in memory. Raises OSError or ValueError."""
    found: dict[str, list[dict]] = {}
    rest, section = bytearray(), ""
    for line in _lines(path):
        if section and line.startswith(b'  {"'):
            found.setdefault(section, []).append(plain(parse_object(line.rstrip(b",\n"))))
            continue
        begins = SECTION.fullmatch(line)
        section = begins[1].decode() if begins else ""
        rest += line
        if len(rest) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes that are not rows")
    return plain(parse_object(bytes(rest))) | found


def _lines(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        yield from iter(lambda: file.readline(MAX_BYTES), b"")


def plain(value: Any) -> Any:
    """The same content as JSON that every reader takes: NaN and infinity, which JSON lacks, are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, (dict, list, tuple)):
        return value
    if isinstance(value, dict):
        return {sys.intern(str(key)): plain(item) for key, item in value.items()}  # rows share names
    return [plain(item) for item in value]


def _check(record: dict) -> None:
    """Raises ValueError if this is not a record. Fills in what records of earlier versions lack."""
    try:
        attempts, sections = _attempts(record), [record.setdefault(section, []) for section in SECTIONS]
        entries = [entry for section in sections for entry in section]
        for entry in entries:
            entry.setdefault("attempt", 1)
        superseded = [entry for section in record.get("superseded", {}).values() for entry in section]
        right = (
            all(isinstance(section, list) for section in sections)
            and all(isinstance(one, dict) for one in (record["startup_info"], *superseded))
            and all(RUN_NAME.fullmatch(attempt["run_name"]) for attempt in attempts)
            and all(_is_entry(entry, len(attempts)) for entry in entries)
            and _is_count(record.get("journal_lines", 0))
        )
    except (AttributeError, KeyError, TypeError):  # something is no object, or has no name
        right = False
    if not right:
        raise ValueError("it is not what a run writes")


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_entry(entry: object, attempts: int) -> bool:
    """Whether it belongs to an iteration, and to one of the attempts that the record has."""
    if not isinstance(entry, dict) or not _is_count(entry.get("iter")):
        return False
    attempt = entry.get("attempt")
    return type(attempt) is int and 1 <= attempt <= attempts


def _journal(path: Path, known: int, attempts: int) -> list[tuple[str, dict]]:
    """(section, entry) of each complete line after the first `known`, which the record has. A kill or a full
    disk may have cut one off."""
    found = []
    with contextlib.suppress(OSError, ValueError):  # there is no such file
        for line in _lines(path):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not what a run writes
                content = plain(parse_object(line))
                section, entry = content["section"], content["entry"]
                if content["line"] >= known and section in SECTIONS and _is_entry(entry, attempts):
                    found.append((section, entry))
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


def recovery(record: dict, start: int) -> dict:
    """What the end of the attempt in `record` cost a run that goes on from iteration `start`: the iterations
    and seconds up to its last row that are made again, and from that row the seconds until the first of this
    run, which is not there yet. What the attempt made after its last row is not known."""
    attempt, iterations, seconds = len(_attempts(record)), 0, 0.0
    rows = [row for row in record["training_iterations"] if row["attempt"] == attempt]
    for before, row in zip([{"iter": row["iter"] - 1} for row in rows[:1]] + rows, rows, strict=False):
        again = max(row["iter"] - max(before["iter"], start - 1), 0)
        milliseconds = row.get("time_ms")  # per iteration
        iterations += again
        seconds += again * milliseconds / 1000 if type(milliseconds) in (int, float) else 0
    last = rows[-1].get("time") if rows else None
    costs = {"iterations_repeated": iterations, "seconds_repeated": seconds}
    return {"last_row_time": last, "seconds_to_first_row": None, **costs}


def _attempts(record: dict) -> list[dict]:
    """The attempts in a record. A record of an earlier version of this code is one attempt."""
    keys = ("run_name", "start_time", "end_time", "status")
    attempts = record.get("attempts") or [{"attempt": 1, **{key: record.get(key) for key in keys}}]
    last = attempts[-1]
    if last.get("status") == "running":  # no longer: the next attempt has begun
        last = {**last, "status": "killed"}
    return [*attempts[:-1], last]
