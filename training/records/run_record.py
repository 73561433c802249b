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
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from io import FileIO
from pathlib import Path
from typing import Any

from common.durable_file import replace_file
from common.errors import RunError
from common.run_records import JOURNAL, plain, render
from training.configuration.keys import TrainConfig
from training.configuration.rules import tracker_names
from training.process.console import start_logging
from training.process.memory import GIB, resident_bytes
from training.process.redaction import redact_all
from training.process.run_lock import RunLock
from training.process.world import World, from_rank_0
from training.records.attempts import attempts_of, carried_over, find_history, recovery
from training.records.follower import Follower

SAVING_SHARE = 0.01  # of the run's time, for rendering the JSON
GROWTH = 1.01  # of its entries, until the next time: all times together write 101 times as much as the last
ENCODER = json.JSONEncoder(allow_nan=False)
TEMPORARY = "record.tmp"  # one name, so that what kills leave does not pile up
FINAL_PAUSES_S = 0.0, 0.5  # before each attempt to complete it

log = logging.getLogger("nanomfu")


def new_record_path(config: TrainConfig) -> Path:
    """out_dir/run_YYYYMMDD_HHMMSS.json, a name that no earlier record has. An evaluation alone has eval_...,
    so that `run_*.json` does not find it."""
    out_dir, kind = Path(config.out_dir), "eval" if config.eval_only else "run"
    name = f"{kind}_{datetime.now():%Y%m%d_%H%M%S}"
    paths = [out_dir / f"{name}.json"] + [out_dir / f"{name}_{i}.json" for i in range(2, 100)]
    # lexists: a link that leads nowhere would be written through
    files = {path: (path, path.with_suffix(".log"), path.with_suffix(JOURNAL)) for path in paths}
    return next(path for path in paths if not any(map(os.path.lexists, files[path])))


def open_log(config: TrainConfig, world: World) -> Path:
    """The path of this run's record, the same on all ranks. Also opens the log beside it, which rank 0
    writes. All ranks."""
    path = from_rank_0(new_record_path(config) if world.is_main else None, world)
    start_logging(path.with_suffix(".log") if world.is_main else None, console=world.is_main)
    return path


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
        self.path, self.enabled = path, enabled
        self.run_lock = run_lock or RunLock(path.parent)
        earlier = attempts_of(history) if history else []
        self.attempt = len(earlier) + 1
        self.this_attempt = {
            "attempt": self.attempt,
            "run_name": path.stem,
            "start_time": _now(),
            "end_time": None,
            "status": "running",
            "start_iter": start,
            "resumed_from": startup_info.get("resumed_from"),
            "restarts": (startup_info.get("launch") or {}).get("restarts", 0),
            "recovery": recovery(history, start) if history else None,
        }
        self.fields: dict[str, Any] = {
            **{name: self.this_attempt[name] for name in ("run_name", "start_time", "end_time", "status")},
            "attempt": self.attempt,
            "attempts": [*earlier, self.this_attempt],
            "config": config,
            "startup_info": startup_info,
            "summary": None,
        }
        self.journal: FileIO | None = None
        self.journal_bytes = 0
        self.noted = self._fields()
        self.pending = deque([self.noted])  # lines that the journal lacks: all, before it is begun
        if history:
            self.pending.extend(map(to_line, carried_over(history, start)))
        self.follower: Follower | None = None  # sends this record to trackers
        self.newest = start  # the highest iteration of an entry
        self.count, self.saved = len(self.pending) - 1, 0  # entries: all, those in the JSON
        self.save_not_before = 0.0
        self.warned = False
        self.lock = threading.Lock()  # the watchdog's thread may complete the record

    @property
    def content(self) -> dict[str, Any]:
        """All of it, as a reader of the JSON would find it."""
        return json.loads(b"".join(render(self._lines())))

    def add_iteration(self, row: dict) -> None:
        mfu, memory, row = row["mfu"], row["memory"], {**row, "time": _now("milliseconds")}
        if (cost := self.this_attempt["recovery"]) and cost["seconds_to_first_row"] is None:
            with contextlib.suppress(TypeError, ValueError):  # earlier versions wrote no time
                last, now = map(datetime.fromisoformat, (cost["last_row_time"], row["time"]))
                cost["seconds_to_first_row"] = (now - last).total_seconds()
        self._add("training_iterations", row)
        if mfu is None or not math.isfinite(row["loss"]):
            return  # one-line scripts calculate with what is in training_progress: no null
        flat = {
            "iter": row["iter"],
            "loss": row["loss"],
            "mfu": mfu["mfu"],
            "tokens_per_sec": row["tokens_per_sec"],
            "memory_allocated_gb": memory["allocated_gb"] if memory else resident_bytes() / GIB,
            "memory_kind": "allocated on the GPU" if memory else "resident memory of the process",
            "dt_ms": row["time_ms"],
        }
        self._add("training_progress", flat)

    def add_evaluation(self, iteration: int, losses: dict, lr: float) -> None:
        losses_of = {"train_loss": losses["train"], "val_loss": losses["val"]}
        step = {"iter": iteration, **losses_of, "lr": lr, "time": _now()}
        if "sources" in losses:  # of a mixture
            step["sources"] = losses["sources"]
        self._add("eval_steps", step)

    def add_checkpoint(self, iteration: int, val_loss: float | None, path: Path, **seconds: float) -> None:
        self._add("checkpoints", {"iter": iteration, "val_loss": val_loss, "path": str(path), **seconds})

    def add_event(self, iteration: int, kind: str, **facts) -> None:
        """Records what is in no log row: bad numbers, a straggler, a fault that the run survived."""
        self._add("events", {"iter": iteration, "kind": kind, "time": _now(), **facts})

    def _add(self, section: str, entry: dict) -> None:
        late = {"noted_at_iter": self.newest} if entry["iter"] < self.newest else {}
        self.newest = max(self.newest, entry["iter"])
        self.pending.append(to_line({section: redact_all({**entry, "attempt": self.attempt, **late})}))
        self.count += 1
        self._write(self._extend_journal)

    def finish(self, status: str, summary: dict) -> None:
        end = {"status": status, "end_time": _now()}
        self.fields.update(**end, summary=summary)
        self.this_attempt.update(end)
        for pause in FINAL_PAUSES_S:
            time.sleep(pause)
            self.warned = False
            self.save(at_once=True)
            if not self.warned:
                return
        name = self.path.with_suffix(JOURNAL).name
        lacks = f"the rows that it lacks are in {name} beside it, and a resume puts them into its own record"
        if self.pending:
            lacks = f"{len(self.pending):,} lines are lost, as {name} could not be written either"
        raise RunError(f"the run record {self.path} could not be completed; {lacks}")

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
        path = self.path.with_suffix(JOURNAL)
        if self.journal is None:
            begin = list(self.pending)
            replace_file(path, begin, TEMPORARY)
            self.journal = open(path, "a+b", buffering=0)  # each line is written at once
            self.journal_bytes = sum(map(len, begin))
            for _ in begin:
                self.pending.popleft()
        if os.fstat(self.journal.fileno()).st_size > self.journal_bytes:
            self.journal.truncate(self.journal_bytes)  # a full disk has taken a part of a line
        while self.pending:
            line = self.pending[0]
            if self.journal.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.journal_bytes += len(self.pending.popleft())

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

    def _lines(self) -> Iterator[bytes]:
        """Of the journal, and those that it lacks."""
        if self.journal:
            with open(os.dup(self.journal.fileno()), "rb") as file:  # also if its name was removed
                file.seek(0)
                yield from file
        yield from list(self.pending)

    def _fields(self) -> bytes:
        """Without secrets; but attempts find each other by run_name."""
        return to_line(redact_all(self.fields, keep=("run_name",)))


def accumulation_steps(config: TrainConfig, world_size: int) -> dict[str, int]:
    """The steps of one GPU and those of all: a log with one number for both once hid a wrong MFU."""
    per_gpu = config.micro_steps
    return {
        "gradient_accumulation_steps_per_gpu": per_gpu,
        "gradient_accumulation_steps_global": per_gpu * world_size,
    }


def open_record(
    config: TrainConfig,
    world: World,
    run_lock: RunLock,
    path: Path,
    info: dict[str, Any],
    resumed_run: str | None,
    start: int,
) -> RunRecord | None:
    """The record of this attempt, with the entries of earlier ones; None on all ranks except 0. resumed_run
    is the run that saved the checkpoint from which this one resumes."""
    if not world.is_main:
        return None
    keys = {**config.to_dict(), **accumulation_steps(config, world.size)}
    history = None if config.eval_only else find_history(path.parent, resumed_run, info["launch"])
    record = RunRecord(path, keys, info, config.save_log_to_json, history, start, run_lock)
    if names := tracker_names(config):
        record.save(at_once=True)
        record.follower = Follower(names, path)
    return record


def to_line(value: dict[str, Any]) -> bytes:
    return ENCODER.encode(plain(value)).encode() + b"\n"


def _now(unit: str = "seconds") -> str:
    return datetime.now().astimezone().isoformat(timespec=unit)
