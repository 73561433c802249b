"""Writes the run record: one JSON file per run, written by rank 0. It cannot end a run: a full disk gives one
warning, and what could not be written is written when there is space again.

The JSON is replaced atomically, so it can be parsed at every moment, also after kill -9. To rewrite many rows
takes long, so a rewrite waits for one percent more rows, and gets at most one percent of the time: a row
costs the same in a long run. What was added since is in a journal beside it, one line per entry;
training/records/attempts.py reads the journal if the run does not end in order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from io import RawIOBase
from pathlib import Path
from typing import Any

from common.durable_file import create, sync_folder
from common.errors import RunError
from training.configuration.keys import TrainConfig
from training.configuration.rules import tracker_names
from training.process.console import start_logging
from training.process.memory import GIB, resident_bytes
from training.process.redaction import redact_all
from training.process.run_lock import RunLock
from training.process.world import World, from_rank_0
from training.records.attempts import SECTIONS, carry_over, find_history, journal_path, plain, recovery
from training.records.follower import Follower

SAVING_SHARE = 0.01  # of the run's time, for rewriting the JSON
GROWTH = 1.01  # of its entries, until the next rewrite: all rewrites write 101 times as much as the last one
ENCODER = json.JSONEncoder(allow_nan=False)
FINAL_PAUSES_S = 0.0, 0.5  # before each attempt to complete it

log = logging.getLogger("nanomfu")


def new_record_path(config: TrainConfig) -> Path:
    """out_dir/run_YYYYMMDD_HHMMSS.json, a name that no earlier record has. An evaluation alone has eval_...,
    so that `run_*.json` does not find it."""
    out_dir, kind = Path(config.out_dir), "eval" if config.eval_only else "run"
    name = f"{kind}_{datetime.now():%Y%m%d_%H%M%S}"
    paths = [out_dir / f"{name}.json"] + [out_dir / f"{name}_{i}.json" for i in range(2, 100)]
    # lexists: a link that leads nowhere would be written through
    files = {path: (path, path.with_suffix(".log"), journal_path(path)) for path in paths}
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
        self.path = path
        self.run_lock = run_lock or RunLock(path.parent)
        earlier = carry_over(history, start)
        self.attempt = len(earlier["attempts"]) + 1
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
        self.content = {
            **{name: self.this_attempt[name] for name in ("run_name", "start_time", "end_time", "status")},
            "attempt": self.attempt,
            "attempts": [*earlier["attempts"], self.this_attempt],
            "config": config,
            "startup_info": startup_info,
            **{section: Entries(earlier[section]) for section in SECTIONS},
            "superseded": earlier["superseded"],
            "summary": None,
            "journal_lines": 0,  # those that are in this file already
        }
        self.journal = Journal(journal_path(path)) if enabled else None
        self.follower: Follower | None = None  # sends this record to trackers
        self.carried = len(earlier["training_iterations"])
        self.newest = start  # the highest iteration of an entry
        self.saved = 0  # entries in the JSON
        self.save_not_before = 0.0
        self.warned = False
        self.lock = threading.Lock()  # the watchdog's thread may complete the record

    @property
    def own_rows(self) -> list[dict]:
        """The log rows of this attempt: earlier attempts may have had other hardware."""
        return [json.loads(line) for line in self.content["training_iterations"].lines[self.carried :]]

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
        line = to_line(plain(redact_all({**entry, "attempt": self.attempt, **late})))
        self.content[section].lines.append(line)
        if self.journal and not self.run_lock.is_lost():
            with self._surviving(self.journal.path):
                self.journal.append(section, line)

    def finish(self, status: str, summary: dict) -> None:
        end = {"status": status, "end_time": _now()}
        self.content.update(**end, summary=summary)
        self.this_attempt.update(end)
        for pause in FINAL_PAUSES_S:
            time.sleep(pause)
            self.warned = False
            self.save(at_once=True)
            if not self.warned:
                return
        name = journal_path(self.path).name
        lacks = f"the rows that it lacks are in {name} beside it, and a resume puts them into its own record"
        if self.journal and self.journal.lost:
            lacks = f"{self.journal.lost:,} rows and events are lost, as {name} could not be written either"
        raise RunError(f"the run record {self.path} could not be completed; {lacks}")

    def save(self, at_once: bool = False) -> None:
        """Rewrites the JSON, unless that was done shortly before, or for almost as many entries."""
        began, entries = time.monotonic(), sum(len(self.content[section]) for section in SECTIONS)
        if self.journal is None or self.run_lock.is_lost():
            return
        has_grown = entries >= GROWTH * self.saved or self.journal.lost
        if not at_once and (began < self.save_not_before or not has_grown):
            return
        with self._surviving(self.path):
            self.content["journal_lines"] = self.journal.lines
            _replace(self.path, _text(self.content))
            self.saved = entries
            self.journal.clear(remove=self.content["end_time"] is not None)
            self.warned = False
        now = time.monotonic()
        self.save_not_before = now + (now - began) / SAVING_SHARE

    @contextlib.contextmanager
    def _surviving(self, what):
        """Wraps a write. If the write fails, everything is still in self.content."""
        try:
            with self.lock:
                yield
        except OSError as error:
            if not self.warned:
                self.warned = True
                log.warning("could not write %s: %s; it is tried again", what, error)


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


class Entries(Sequence[dict]):
    """A section's entries, each as its line of JSON: less memory than the objects take, and a rewrite need
    not make it anew."""

    def __init__(self, entries: Iterable[dict]):
        self.lines = [to_line(entry) for entry in entries]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, place: Any) -> Any:
        return json.loads(self.lines[place])


def to_line(value: dict) -> bytes:
    return ENCODER.encode(value).encode()


class Journal:
    """Holds entries that the JSON does not have yet. Each line is written at once. It begins with the line
    break, so that a line that was cut off by a full disk does not spoil the next one."""

    def __init__(self, path: Path):
        self.path = path
        self.file: RawIOBase | None = None
        self.lines = 0  # of the whole run
        self.lost = 0  # of those that neither this file nor the JSON has

    def append(self, section: str, entry: bytes) -> None:
        line = b'\n{"line": %d, "section": "%s", "entry": %s}' % (self.lines, section.encode(), entry)
        self.lines, self.lost = self.lines + 1, self.lost + 1  # until it is written
        if self.file is None:
            self.file = create(self.path).detach()  # without a buffer: each line is written at once
        self.lost -= self.file.write(line) == len(line)  # a full disk may take a part of it

    def clear(self, remove: bool) -> None:
        self.lost = 0
        if self.file is None:
            return
        if remove:
            self.file.close()
            self.file = None
            self.path.unlink(missing_ok=True)
        else:
            self.file.truncate(0)
            self.file.seek(0)


def _text(content: dict) -> Iterator[bytes]:
    """JSON with one line per entry: small, quick to make, and usable by tools that read lines."""
    for number, (name, value) in enumerate(content.items()):
        yield b"%s\n %s: " % (b"," if number else b"{", json.dumps(name).encode())
        if name == "superseded":
            yield to_line(value)
        elif isinstance(value, Entries):
            for place, line in enumerate(value.lines):
                yield (b",\n  " if place else b"[\n  ") + line
            yield b"\n ]" if value else b"[]"
        else:
            value = redact_all({name: value}, keep=("run_name",))[name]  # attempts find each other by it
            yield json.dumps(plain(value), indent=1, allow_nan=False).replace("\n", "\n ").encode()
    yield b"\n}\n"


def _replace(path: Path, text: Iterator[bytes]) -> None:
    temporary = path.with_name("record.tmp")  # one name, so that what kills leave does not pile up
    with create(temporary) as file:
        file.writelines(text)
        file.flush()
        os.fsync(file.fileno())  # so that a loss of power leaves the old file or the new one
    os.replace(temporary, path)
    sync_folder(path.parent)  # before the journal is emptied, which holds what the old file lacks


def _now(unit: str = "seconds") -> str:
    return datetime.now().astimezone().isoformat(timespec=unit)
