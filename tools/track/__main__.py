"""Sends a run record to experiment trackers: all attempts, each figure once.

    python -m tools.track out-quickstart/run_20260101_120000.json --trackers=tensorboard,wandb

A tracker gets only what it lacks, so one that failed only needs this command once more. train.py itself
starts it, with --follow, if `trackers` is set (training/records/follower.py).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.arguments import user_folder, whole_number
from common.command import FAILED, run_command, say
from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from common.processes import is_running
from tools.track.figures import figures_of
from tools.track.trackers import NOTHING, TRACKERS, Run
from training.configuration.keys import GUARDED
from training.configuration.rules import named_trackers, require_tracker
from training.process.redaction import redact, redact_all
from training.records.attempts import read_record

SECTIONS = ("training_iterations", "eval_steps", "checkpoints", "events")  # of the record
POLL_S = 2.0  # between two looks at the record of a live run
CONSTANT = ("model", "hardware", "software", "flops", "optimizer", "attention")  # of startup_info


def main(argv: list[str]) -> int:
    options = parse(argv)
    names = named_trackers(options.trackers)
    if not names:
        raise UserError(f"--trackers is empty; name one or more of {', '.join(TRACKERS)}")
    for name in names:
        require_tracker(name)
    first = read(options.record)
    with open(options.record.parent / "trackers.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # a process of an earlier attempt ends within seconds
        run = run_of(first, options.record.parent)
        senders = [Sender(name, run) for name in names]
        while True:
            is_alive = options.follow is not None and is_running(options.follow)
            record = read(options.record)  # after that look: what a process that has ended wrote is complete
            live = is_alive and record["status"] == "running"
            # Of a live run, up to the row before its newest, which may not be complete. Of one that was
            # stopped, up to its newest: a resume makes the row that belongs to what comes after it.
            newest = max((row["iter"] for row in record["training_iterations"]), default=NOTHING)
            is_whole = options.follow is None or record["status"] == "completed"
            for sender in senders:
                sender.take(record, math.inf if is_whole else newest - live)
            if not live:
                break
            time.sleep(POLL_S)
        for sender in senders:
            sender.close(record["status"] == "completed", record.get("summary") or {})
    return FAILED if any(sender.failed for sender in senders) else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.track", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("record", metavar="RUN.json", type=user_folder, help="a run record, out_dir/run_*.json")
    add("--trackers", required=True, help=f"one or more of {','.join(TRACKERS)}")
    add("--follow", type=whole_number(1, 2**31), metavar="PID", help="until this process ends")
    return parser.parse_args(argv)


def read(path: Path) -> dict[str, Any]:
    """The record. Raises UserError if it is none."""
    try:
        return {"status": None, **read_record(path)}
    except (OSError, ValueError) as error:
        why = f"{path} cannot be read as a run record: {error}; name a file out_dir/run_*.json"
        raise UserError(why) from None


def run_of(record: dict[str, Any], folder: Path) -> Run:
    """Its id is in out_dir, in trackers_RUN.json, where RUN is the first attempt: so every attempt continues
    the same run. An attempt that makes iterations again, with settings that change the training, is a new
    one: the trackers would go on showing the old losses."""
    attempts, startup = record.get("attempts") or [record], record["startup_info"]
    config = record["config"] if isinstance(record.get("config"), dict) else {}
    settings, start = {key: config.get(key) for key in GUARDED}, attempts[-1].get("start_iter") or 0
    lost = record.get("superseded", {}).get("training_iterations", [])
    path = folder / f"trackers_{attempts[0]['run_name']}.json"
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):  # there is none yet, or it is damaged
        known = read_json(path, 100_000)
    before = known.get("settings")
    is_other = isinstance(before, dict) and any(before.get(key, now) != now for key, now in settings.items())
    is_other = is_other and any(row.get("iter", -1) >= start for row in lost)
    run_id = str(known.get("id", ""))
    if is_other or not run_id.isalnum():
        run_id = uuid.uuid4().hex[:8]
    write_json(path, {"id": run_id, "settings": settings})
    name = redact(str(config.get("wandb_run_name") or attempts[0]["run_name"]))
    project = redact(str(config.get("wandb_project") or "nanomfu"))
    facts = {**config, "startup_info": {key: startup.get(key) for key in CONSTANT}}
    return Run(run_id, name, project, folder, redact_all(facts))


class Sender:
    """One tracker. What fails gets nothing more from this process, and the others go on."""

    def __init__(self, name: str, run: Run):
        self.name, self.run, self.sent, self.failed = name, run, 0, False
        self.tracker = TRACKERS[name]()
        with self.failing():
            self.last = self.tracker.open(run)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self.failed = True
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            say(f"error: {self.name} gets nothing more: {why}. The record has everything: start this again")

    def take(self, record: dict[str, Any], end: float) -> None:
        """Sends what the tracker lacks, up to the step `end`."""
        with self.failing():
            for step, figures in [] if self.failed else steps_of(record, self.last, end):
                self.tracker.send(step, figures)
                self.last, self.sent = step, self.sent + 1

    def close(self, completed: bool, summary: dict[str, Any]) -> None:
        """Says what was sent, once the tracker has it."""
        with self.failing():
            has = None if self.failed else self.tracker.close(completed, summary)
            if has is not None and has < self.last:
                raise RuntimeError(f"it took figures up to iteration {self.last}, but has {has}")
        if not self.failed:
            print(f"{self.name}: sent {self.sent:,} iterations of {self.run.unique_name}", flush=True)


def steps_of(record: dict[str, Any], last: int, end: float) -> list[tuple[int, dict[str, float]]]:
    """(step, figures) of all after the step `last` and up to `end`, by rising steps. The step is the
    iteration; of what was complete only later, such as a checkpoint, that at which it was noted."""
    found: dict[int, dict[str, float]] = {}
    for section in SECTIONS:
        for entry in record[section]:
            step = max(entry["iter"], entry.get("noted_at_iter") or 0)
            if not last < step <= end:
                continue
            figures = found.setdefault(step, {})
            for name, value in figures_of(section, entry).items():
                is_count = name.startswith("events/") and name.count("/") == 1  # two of a kind are 2
                figures[name] = figures.get(name, 0) + value if is_count else value
    return [(step, figures) for step, figures in sorted(found.items()) if figures]


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
