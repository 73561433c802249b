"""Writes the run record, on rank 0. It cannot end a run: a full disk gives one warning, and what could not be
written is written when there is space again.

Each entry is at once a line of the journal (common/run_records.py), so that kill -9 loses none. The journal
begins with what earlier attempts recorded. The JSON is rendered from it and replaced as a whole, so it can be
parsed at every moment. To render many rows takes long, so it waits for one percent more entries, and gets at
most one percent of the time: a row costs the same in a long run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

from common.durable_file import replace_file
from common.errors import RunError
from common.run_records import JOURNAL, plain, render
from training.process.redaction import redact_all
from training.process.run_lock import RunLock
from training.records.attempts import carried_over, recovery

SAVING_SHARE = 0.01  # of the run's time, for rendering the JSON
GROWTH = 1.01  # of its entries, until the next time: all times together write 101 times as much as the last
ENCODER = json.JSONEncoder(allow_nan=False)
TEMPORARY = "record.tmp"  # one name, so that what kills leave does not pile up
FINAL_PAUSES_S = 0.0, 0.5  # before each attempt to complete it

log = logging.getLogger("nanomfu")


class RunRecord:
    """Everything needed to reproduce and plot a run's numbers, together with what its earlier attempts
    recorded."""

    def __init__(
        self,
        path: Path,
        config: dict,
        startup_info: dict,
        enabled: bool,
        history: dict | None = None,
        start: int = 0,
        run_lock: RunLock | None = None,
    ):
        """`history` is the record of the previous attempt (training/records/attempts.py), which this one
        continues from iteration `start`. `startup_info` may still be filled in during the run. Once
        `run_lock` is lost, nothing is written: the folder of this name may be another run's."""
        self.path, self.enabled, self.run_lock = path, enabled, run_lock or RunLock(path.parent)
        earlier = history["attempts"] if history else []
        if earlier and earlier[-1].get("status") == "running":  # no longer: this attempt has begun
            earlier = [*earlier[:-1], {**earlier[-1], "status": "killed"}]
        self.attempt = len(earlier) + 1
        about = {"run_name": path.stem, "start_time": _now(), "end_time": None, "status": "running"}
        self.this_attempt: dict[str, Any] = {
            "attempt": self.attempt,
            **about,
            "start_iter": start,
            "resumed_from": startup_info.get("resumed_from"),
            "restarts": (startup_info.get("launch") or {}).get("restarts", 0),
            "recovery": recovery(history, start) if history else None,
        }
        attempts = {"attempt": self.attempt, "attempts": [*earlier, self.this_attempt]}
        self.fields = {**about, **attempts, "config": config, "startup_info": startup_info, "summary": None}
        self.noted = self._fields()
        lines = carried_over(history, start) if history else []
        self.pending = deque([self.noted, *map(to_line, lines)])  # that the journal lacks
        self.journal: FileIO | None = None
        self.written = 0  # bytes of the journal
        self.newest = start  # the highest iteration of an entry
        self.count, self.saved = len(self.pending) - 1, 0  # entries: all, those in the JSON
        self.save_not_before = 0.0
        self.warned = False
        self.lock = Lock()  # the watchdog's thread may complete the record

    @property
    def content(self) -> dict[str, Any]:
        """All of it, as a reader of the JSON would find it."""
        with self.lock:  # reading moves the journal's position
            return json.loads(b"".join(render(self._lines())))

    def add(self, section: str, entry: dict[str, Any]) -> None:
        """Adds an entry, which begins with the iteration that it is of, to one of SECTIONS."""
        iteration, time_now = entry["iter"], _now("milliseconds")
        late = {"noted_at_iter": self.newest} if iteration < self.newest else {}
        self.newest = max(self.newest, iteration)
        cost = self.this_attempt["recovery"]
        if section == "training_iterations" and cost and cost["seconds_to_first_row"] is None:
            with contextlib.suppress(TypeError, ValueError):  # earlier versions wrote no time
                last, now = map(datetime.fromisoformat, (cost["last_row_time"], time_now))
                cost["seconds_to_first_row"] = (now - last).total_seconds()
        entry = redact_all({**entry, "time": time_now, "attempt": self.attempt, **late})
        self.pending.append(to_line({section: entry}))
        self.count += 1
        self._write(self._extend_journal)

    def add_event(self, iteration: int, kind: str, **facts) -> None:
        """Adds what is in no log row: bad numbers, a straggler, a fault that the run survived."""
        self.add("events", {"iter": iteration, "kind": kind, **facts})

    def close(self, status: str, summary: dict) -> None:
        """The end of the record. Raises RunError if the JSON cannot be written."""
        end = {"status": status, "end_time": _now()}
        self.fields.update(**end, summary=summary)
        self.this_attempt.update(end)
        for pause in FINAL_PAUSES_S:
            time.sleep(pause)
            self.warned = False
            self.save(at_once=True)
            if not self.warned:
                return
        raise RunError(
            f"the run record {self.path} could not be completed; {self.path.stem}{JOURNAL} beside it has its "
            f"rows, for the next resume; {len(self.pending):,} lines are lost"
        )

    def save(self, at_once: bool = False) -> None:
        """Renders the JSON, unless that was done shortly before, or for almost as many entries."""
        if (fields := self._fields()) != self.noted:
            self.noted = fields
            self.pending.append(fields)
        self._write(self._extend_journal)
        began = time.monotonic()
        if at_once or (began >= self.save_not_before and self.count >= GROWTH * self.saved):
            self._write(self._render)
            now = time.monotonic()
            self.save_not_before = now + (now - began) / SAVING_SHARE

    def _write(self, action: Callable[[], None]) -> None:
        """What cannot be written is still pending."""
        if not self.enabled or self.run_lock.is_lost():
            return
        try:
            with self.lock:
                action()
        except OSError as error:
            if not self.warned:
                log.warning("could not write the run record %s: %s; it is tried again", self.path, error)
            self.warned = True

    def _extend_journal(self) -> None:
        if self.journal is None:
            path, begin = self.path.with_suffix(JOURNAL), list(self.pending)
            replace_file(path, begin, TEMPORARY)
            self.journal = open(path, "a+b", buffering=0)  # each line is written at once
            self.written = sum(len(self.pending.popleft()) for _ in begin)
        if os.fstat(self.journal.fileno()).st_size > self.written:
            self.journal.truncate(self.written)  # a full disk has taken a part of a line
        while self.pending:
            if self.journal.write(self.pending[0]) != len(self.pending[0]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.written += len(self.pending.popleft())

    def _render(self) -> None:
        is_over, count = self.fields["end_time"] is not None, self.count
        if self.pending and not is_over:  # while the run goes on, the journal has all that the JSON has
            return
        replace_file(self.path, render(self._lines()), TEMPORARY)
        self.saved, self.warned = count, False
        if is_over:
            self.enabled = False
            with contextlib.suppress(OSError):  # who reads the JSON sees that it is whole
                self.path.with_suffix(JOURNAL).unlink()

    def _lines(self) -> list[bytes]:
        """Of the journal, also if its name was removed, and those that it lacks."""
        if self.journal:
            self.journal.seek(0)
        written = self.journal.readall() if self.journal else b""
        return [*written.splitlines(keepends=True), *self.pending]

    def _fields(self) -> bytes:
        """Without secrets; but attempts find each other by run_name."""
        return to_line(redact_all(self.fields, keep=("run_name",)))


def to_line(value: dict[str, Any]) -> bytes:
    return ENCODER.encode(plain(value)).encode() + b"\n"


def _now(unit: str = "seconds") -> str:
    return datetime.now().astimezone().isoformat(timespec=unit)
