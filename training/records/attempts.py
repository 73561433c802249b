"""Carries over what a run's earlier attempts recorded. A resume, or a restart by torchrun, is another
attempt: its record begins with theirs, so that the newest file has the whole run, each iteration once.

The trap is an iteration that was done twice. Iterations after the last checkpoint are lost with the attempt
that made them. Their entries move to `superseded`, so that a reader of the lists need not know that the run
was ever interrupted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.run_records import JOURNAL, SECTIONS, load_record, run_records
from training.process.redaction import redact

RUN_NAME = re.compile(r"[\w.-]{1,200}")  # the stem of a record's path

log = logging.getLogger("nanomfu")


def find_history(out_dir: Path, run_name: str | None, launch: dict | None) -> dict | None:
    """The record of the previous attempt: the newest that continues the run which wrote the checkpoint or,
    without a checkpoint, that this same torchrun started. None if there is none: the history begins here."""
    if not run_name and not (launch and launch["restarts"]):
        return None
    for path in sorted(run_records(out_dir), key=_changed_at, reverse=True):
        try:
            record = read_record(path)
            # redacted, as it is in the record: the environment is still the same torchrun's
            started_by = (record["startup_info"].get("launch") or {}).get("id")
            names = [attempt["run_name"] for attempt in attempts_of(record)]
            if run_name in names if run_name else launch and started_by == redact(launch["id"]):
                return record
        except (OSError, ValueError) as error:
            log.warning("the rows of earlier attempts are left out: %s cannot be read (%s)", path, error)
        if not run_name or path.stem == run_name:  # older records cannot contain it
            break
    return None


def _changed_at(path: Path) -> int:
    """Time of the last change of the record or its journal, in ns."""
    found = [0]
    for file in (path, path.with_suffix(JOURNAL)):
        with contextlib.suppress(OSError):  # there is none, or no more
            found.append(file.lstat().st_mtime_ns)
    return max(found)


def read_record(path: Path) -> dict[str, Any]:
    """A record with all that its run wrote, and with what those of earlier versions lack. Raises OSError, or
    ValueError if a run would not have written it."""
    record = load_record(path)
    try:
        attempts, sections = attempts_of(record), [record.setdefault(section, []) for section in SECTIONS]
        lists = [*sections, *record.setdefault("superseded", {}).values()]
        for entry in itertools.chain(*lists):
            number, made_by = entry["iter"], entry.setdefault("attempt", 1)
            if not (type(number) is type(made_by) is int and number >= 0 < made_by <= len(attempts)):
                raise ValueError("an entry belongs to no iteration, or to no attempt")
        is_right = all(isinstance(each, list) for each in lists)
        is_right &= all(RUN_NAME.fullmatch(attempt["run_name"]) is not None for attempt in attempts)
        is_right &= isinstance(record["startup_info"].get("launch"), (dict, type(None)))
    except (AttributeError, KeyError, TypeError):  # something is no object, or has no name
        is_right = False
    if not is_right:
        raise ValueError("it is not what a run writes")
    # earlier versions listed rows without a loss or an MFU there, too
    progress = record["training_progress"]
    record["training_progress"] = [row for row in progress if None not in (row.get("loss"), row.get("mfu"))]
    return record


def carried_over(record: dict, start: int) -> Iterator[dict]:
    """The lines of the journal of a run that continues this one from iteration `start` on."""
    for lists, again in ((record["superseded"], -1), (record, start)):
        for section in SECTIONS:
            yield from ({section: {"iter": entry["iter"], **entry}} for entry in lists.get(section, []))
        yield {"resumed_at": again}


def recovery(record: dict, start: int) -> dict:
    """What the end of the attempt in `record` cost a run that goes on from iteration `start`: the iterations
    and seconds up to its last row that are made again, and from that row the seconds until the first of this
    run, which is not there yet. What the attempt made after its last row is not known."""
    attempt, iterations, seconds = len(attempts_of(record)), 0, 0.0
    rows = [row for row in record["training_iterations"] if row["attempt"] == attempt]
    done = rows[0]["iter"] - 1 if rows else 0
    for row in rows:
        again = max(row["iter"] - max(done, start - 1), 0)
        done = row["iter"]
        milliseconds = row.get("time_ms")  # per iteration
        iterations += again
        seconds += again * milliseconds / 1000 if type(milliseconds) in (int, float) else 0
    last = rows[-1].get("time") if rows else None
    costs = {"iterations_repeated": iterations, "seconds_repeated": seconds}
    return {"last_row_time": last, "seconds_to_first_row": None, **costs}


def attempts_of(record: dict) -> list[dict]:
    """The attempts in a record. A record of an earlier version of this code is one attempt."""
    keys = ("run_name", "start_time", "end_time", "status")
    attempts = record.get("attempts") or [{"attempt": 1, **{key: record.get(key) for key in keys}}]
    last = attempts[-1]
    if last.get("status") == "running":  # no longer: the next attempt has begun
        last = {**last, "status": "killed"}
    return [*attempts[:-1], last]
