"""Carries over what a run's earlier attempts recorded. A resume, or a restart by torchrun, is another
attempt: its record begins with theirs, so that the newest file has the whole run, each iteration once.

The trap is an iteration that was done twice: those after the last checkpoint are lost with the attempt that
made them. Their entries move to `superseded`, so that a reader of the lists need not know of any attempt.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

from common.run_records import entries_of, read_record, run_records
from training.process.redaction import redact

log = logging.getLogger("nanomfu")


def find_history(out_dir: Path, run_name: str | None, launch: dict | None) -> dict | None:
    """The record of the previous attempt: the newest that continues the run which wrote the checkpoint or,
    without a checkpoint, that this same torchrun started. None if there is none: the history begins here."""
    if not run_name and not (launch and launch["restarts"]):
        return None
    for path in sorted(run_records(out_dir), key=lambda path: path.lstat().st_mtime_ns, reverse=True):
        try:
            record = read_record(path)
            names = [each["run_name"] for each in record["attempts"]]
            started_by = (record["startup_info"].get("launch") or {}).get("id")  # redacted, as all of it
            if run_name in names if run_name else launch and started_by == redact(launch["id"]):
                return record
        except (OSError, ValueError) as error:
            log.warning("the rows of earlier attempts are left out: %s cannot be read (%s)", path, error)
        if not run_name or path.stem == run_name:  # older records cannot contain it
            break
    return None


def carried_over(record: dict, start: int) -> Iterator[dict]:
    """The lines of the journal of a run that continues this one from iteration `start` on."""
    for lists, again in ((record["superseded"], -1), (record, start)):
        yield from ({section: {"iter": entry["iter"], **entry}} for section, entry in entries_of(lists))
        yield {"resumed_at": again}


def recovery(record: dict, start: int) -> dict:
    """What the end of the last attempt cost a run that goes on from iteration `start`: the iterations and
    seconds up to its last row that are made again, and from that row the seconds until the first of this
    run, which is not there yet. What the attempt made after its last row is not known."""
    rows = [row for row in record["training_iterations"] if row["attempt"] == len(record["attempts"])]
    done = [rows[0]["iter"] - 1, *(row["iter"] for row in rows)] if rows else []
    again = [max(end - max(begin, start - 1), 0) for begin, end in itertools.pairwise(done)]
    times = [row["time_ms"] if type(row.get("time_ms")) in (int, float) else 0 for row in rows]
    seconds = sum(n * each / 1000 for n, each in zip(again, times, strict=True))
    last = rows[-1].get("time") if rows else None
    costs = {"iterations_repeated": sum(again), "seconds_repeated": seconds}
    return {"last_row_time": last, "seconds_to_first_row": None, **costs}
