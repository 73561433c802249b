"""Sends a run record to experiment trackers: all attempts, each figure once.

    python -m tools.track out-quickstart/run_20260101_120000.json --trackers=tensorboard,wandb

A tracker gets only what it lacks. train.py itself starts this command, with --follow, if `trackers` is set:
then it reads the record again and again until the run has ended. So nothing that a tracker does can hold up
or end a run, and a tracker that fails only needs this command once more.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from common.arguments import user_folder, whole_number
from common.command import FAILED, run_command, say
from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json
from common.processes import is_running
from tools.track.figures import figures_of, is_count
from tools.track.trackers import NOTHING, TRACKERS, Run
from training.configuration.rules import named_trackers, require_tracker
from training.process.redaction import redact, redact_all
from training.records.attempts import read_record

SECTIONS = ("training_iterations", "eval_steps", "checkpoints", "events")  # of the record
POLL_S = 2.0  # between two looks at the record of a live run
LISTS = ("sources", "files", "timings", "param_groups", "checkpoints_set_aside")  # long: not for a table


def main(argv: list[str]) -> int:
    options = parse(argv)
    names = named_trackers(options.trackers)
    if not names:
        raise UserError(f"--trackers is empty; name one or more of {', '.join(TRACKERS)}")
    for name in names:
        require_tracker(name)
    record = read(options)
    with open(options.record.parent / "trackers.lock", "w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # a process of an earlier attempt ends within seconds
        senders = [Sender(name, run_of(record, options)) for name in names]
        while True:
            live = options.follow is not None and record["status"] == "running" and is_running(options.follow)
            for sender in senders:
                sender.take(record, live, may_resume=options.follow is not None)
            if not live:
                break
            time.sleep(POLL_S)
            record = read(options)
        for sender in senders:
            sender.close(str(record["status"]), record.get("summary") or {})
    return FAILED if any(sender.error for sender in senders) else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.track", description=__doc__.splitlines()[0])
    parser.add_argument(
        "record", metavar="RUN.json", type=user_folder, help="a run record, out_dir/run_*.json"
    )
    parser.add_argument("--trackers", required=True, help="one or more of wandb,tensorboard,trackio")
    parser.add_argument("--project", help="the project in the trackers; without it, the run's wandb_project")
    parser.add_argument(
        "--follow", type=whole_number(1, 2**31), metavar="PID", help="until this process ends"
    )
    parser.add_argument("--new_run", action="store_true", help="as a new run in the trackers")
    return parser.parse_args(argv)


def read(options: argparse.Namespace) -> dict[str, Any]:
    """The record, with what an older one lacks. Raises UserError."""
    try:
        record = read_record(options.record)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{options.record} cannot be read as a run record: {error}; name a file out_dir/run_*.json"
        ) from None
    record["config"] = record["config"] if isinstance(record.get("config"), dict) else {}
    record["attempts"] = record.get("attempts") or [{"run_name": record["run_name"]}]
    return {"status": None, **record}


def run_of(record: dict[str, Any], options: argparse.Namespace) -> Run:
    """Its id is in out_dir, in trackers_RUN.json, where RUN is the first attempt: so every attempt continues
    the same run."""
    config, folder = record["config"], options.record.parent
    first = str(record["attempts"][0]["run_name"])
    path = folder / f"trackers_{first}.json"
    try:
        known = None if options.new_run else read_json(path, 10_000).get("id")
    except (OSError, ValueError):  # a new run
        known = None
    if not (isinstance(known, str) and known.isalnum()):
        known = uuid.uuid4().hex[:8]
        write_json(path, {"id": known})
    name, project = config.get("wandb_run_name") or first, options.project or config.get("wandb_project")
    facts = {**config, "startup_info": _without_lists(record["startup_info"])}
    return Run(known, redact(str(name)), redact(str(project or "nanomfu")), folder, redact_all(facts))


def _without_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_lists(item) for name, item in value.items() if name not in LISTS}
    return value


class Sender:
    """One tracker. What fails gets nothing more from this process, and the others go on."""

    def __init__(self, name: str, run: Run):
        self.name, self.run, self.error, self.steps, self.last = name, run, "", 0, NOTHING
        self.tracker = TRACKERS[name]()
        self.opened = False

    def take(self, record: dict[str, Any], live: bool, may_resume: bool) -> None:
        """Sends what the tracker lacks. Of a live run, not the newest step, which may not be complete. Of one
        that was stopped, not what comes after the last row, such as the checkpoint of the stop: a resume
        makes the row that belongs to this step, and a tracker takes each step once."""
        if self.error:
            return
        try:
            if not self.opened:
                self.last, self.opened = self.tracker.open(self.run), True
            steps = list(steps_of(record, self.last))[: -1 if live else None]
            rows = [row["iter"] for row in record["training_iterations"]]
            end = max(rows, default=NOTHING) if may_resume and record["status"] != "completed" else math.inf
            for step, numbers, texts in (each for each in steps if each[0] <= end):
                self.tracker.send(step, numbers, texts)
                self.last, self.steps = step, self.steps + 1
        except (Exception, SystemExit) as error:
            self.fail(error)

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """Says what was sent, once the tracker has it."""
        if self.error:
            return
        try:
            has = self.tracker.close(status == "completed", summary)
            if has is not None and has < self.last:
                raise RuntimeError(f"it took figures up to iteration {self.last}, but has {has}")
            print(f"{self.name}: sent {self.steps:,} iterations of {self.run.unique_name}", flush=True)
        except (Exception, SystemExit) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        say(
            f"error: {self.name} gets nothing more: {self.error}. The record has everything: start this again"
        )


def steps_of(record: dict[str, Any], last: int) -> Iterator[tuple[int, dict[str, float], dict[str, str]]]:
    """(step, numbers, texts) of all that a tracker lacks which has everything up to `last`, by rising steps.

    The step is the iteration; of what was complete only later, such as a checkpoint, that at which it was
    noted. The trap is a checkpoint from which an attempt resumed: it may have been noted after iterations
    that the attempt made again. If the tracker lacks it, it comes before the first step of that attempt.
    """
    starts = [attempt.get("start_iter") for attempt in record["attempts"]]
    starts = [start if isinstance(start, int) else math.inf for start in starts]  # an old record has none
    newest = max(starts[-1] if len(starts) > 1 else math.inf, last + 1)
    found: dict[int, tuple[dict[str, float], dict[str, str]]] = {}
    for section in SECTIONS:
        for entry in record[section]:
            step = max(entry["iter"], entry.get("noted_at_iter") or 0)
            step = min([step, *starts[entry["attempt"] : -1]])
            if step <= last:
                continue
            if entry["attempt"] < len(starts):
                step = min(step, newest)
            numbers, texts = found.setdefault(int(step), ({}, {}))
            new_numbers, new_texts = figures_of(section, entry)
            for name, value in new_numbers.items():
                numbers[name] = numbers.get(name, 0) + value if is_count(name) else value
            for name, text in new_texts.items():
                texts[name] = f"{texts[name]}\n{text}" if name in texts else text
    for step in sorted(found):
        if found[step][0]:
            yield step, *found[step]


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
