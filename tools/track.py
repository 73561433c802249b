"""Sends a run record to experiment trackers: all attempts, each figure once.

    python -m tools.track out-quickstart/run_20260101_120000.json --trackers=tensorboard,wandb

A tracker gets only what it lacks, so one that failed only needs this command once more. train.py starts it,
with --follow, if `trackers` is set (training/records/follower.py).
"""

from __future__ import annotations

import argparse
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
from common.file_lock import take_lock
from common.json_file import read_json
from common.processes import is_running
from tools.trackers import NOTHING, TRACKERS, Run
from training.configuration.rules import named_trackers, require_tracker
from training.process.redaction import redact_all
from training.records.attempts import read_record

POLL_S = 2.0  # between two looks at the record of a live run
NO_LOCKS = "start no second process that sends records of this folder before this one has ended"
# Of startup_info: what cannot change during a run would be a chart of one horizontal line.
CONSTANT = ("model", "hardware", "software", "flops", "optimizer", "attention")
PLACE = ("iter", "attempt", "noted_at_iter", "lr")  # of entries that are no rows: no figures of theirs
MFU = ("mfu_", "hfu_", "achieved_", "document_")  # so begins what may change of a row's mfu
SPEED = ("time_ms", "tokens_per_sec", "tokens_per_sec_per_gpu", "padding_percent", "target_percent", "warmup")
ROW = {"loss": "train/loss", "lr": "train/learning_rate", "skipped_updates": "train/skipped_updates"}
ROW |= {"tokens_seen": "tokens", "attempt": "run/attempt", **{name: f"speed/{name}" for name in SPEED}}
ROW |= {name: f"gpu/{name}" for name in ("sm_clock_mhz", "power_w", "temperature_c", "throttle")}
ROW |= {name: name for name in ("mfu", "memory", "gradients")}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.track", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("record", metavar="RUN.json", type=user_folder, help="a run record, out_dir/run_*.json")
    add("--trackers", required=True, help=f"one or more of {','.join(TRACKERS)}")
    add("--follow", type=whole_number(1, 2**31), metavar="PID", help="until this process ends")
    options = parser.parse_args(argv)
    names, failed, folder = named_trackers(options.trackers), 0, options.record.parent
    for name in names:
        require_tracker(name)
    try:
        first = read_record(options.record)
    except (OSError, ValueError) as error:
        why = f"{options.record} cannot be read as a run record: {error}; name a file out_dir/run_*.json"
        raise UserError(why) from None
    with open(folder / "trackers.lock", "w") as lock:
        # a process of an earlier attempt ends within seconds
        take_lock(lock.fileno(), folder / "trackers.lock", NO_LOCKS, wait=True)
        run = run_of(first, folder)
        senders = {name: sending(name, run, options.record, options.follow) for name in names}
        while senders:
            for name, sender in list(senders.items()):
                try:
                    if not next(sender, False):
                        del senders[name]
                except (Exception, SystemExit) as error:  # the others go on
                    del senders[name]
                    failed, why = FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    say(f"error: {name} gets nothing more: {why}. Start this again for the rest")
            time.sleep(POLL_S if senders else 0)
    return failed


def sending(name: str, run: Run, path: Path, process: int | None) -> Iterator[bool]:
    """Sends what the tracker lacks. With `process`, it goes on until that one has ended, and yields True each
    time when it has sent what the record has."""
    tracker = TRACKERS[name]()
    last, sent, live = tracker.open(run), 0, True
    while live:
        is_alive = process is not None and is_running(process)
        record = read_record(path)  # after that look: what a process that has ended wrote is complete
        live = is_alive and record.get("status") == "running"
        # Of a live run, up to the row before its newest, which may not be complete. Of one that was
        # stopped, up to its newest: a resume makes the row that belongs to what comes after it.
        newest = max((row["iter"] for row in record["training_iterations"]), default=NOTHING)
        is_whole = record.get("status") == "completed"
        for step, figures in steps_of(record, last, float("inf") if is_whole else newest - live):
            tracker.send(step, figures)
            last, sent = step, sent + 1
        if live:
            yield True
    tracker.close(record)
    print(f"{name}: sent {sent:,} iterations of {run.unique_name}", flush=True)


def run_of(record: dict[str, Any], folder: Path) -> Run:
    """Its id is in out_dir, in trackers_RUN.json, where RUN is the first attempt: so every attempt continues
    the same run."""
    first = (record.get("attempts") or [record])[0]["run_name"]
    path, config = folder / f"trackers_{first}.json", redact_all(record.get("config") or {})
    if not path.exists():
        write_json(path, {"id": uuid.uuid4().hex[:8]})
    run_id, name = read_json(path)["id"], str(config.get("wandb_run_name") or first)
    config["startup_info"] = redact_all({key: record["startup_info"].get(key) for key in CONSTANT})
    return Run(run_id, name, f"{name}-{run_id}", config.get("wandb_project") or "nanomfu", folder, config)


def steps_of(record: dict[str, Any], last: int, end: float) -> list[tuple[int, dict[str, float]]]:
    """(step, figures) of all after the step `last` and up to `end`, by rising steps. The step is the
    iteration; of what was complete only later, such as a checkpoint, that at which it was noted."""
    found: dict[int, dict[str, float]] = {}
    for section in ("training_iterations", "eval_steps", "checkpoints", "events"):
        for entry in record[section]:
            step = max(entry["iter"], entry.get("noted_at_iter") or 0)
            if last < step <= end:
                found[step] = found.get(step, {}) | figures_of(section, entry)
    return [(step, figures) for step, figures in sorted(found.items()) if figures]


def figures_of(section: str, entry: dict[str, Any]) -> dict[str, float]:
    """{name: figure} of an entry in a section of the record (docs/trackers.md)."""
    if section == "training_iterations":
        mfu = {name: value for name, value in (entry.get("mfu") or {}).items() if name.startswith(MFU)}
        fields = {**entry, "mfu": mfu}
        return {k: v for field in ROW for k, v in _numbers(ROW[field], fields.get(field))}
    values = {name: value for name, value in entry.items() if name not in PLACE}
    if section == "eval_steps":
        for source, losses in (values.pop("sources", None) or {}).items():  # of a mixture
            values[source] = {f"{split}_loss": loss for split, loss in losses.items()}
        return dict(_numbers("eval", values))
    values["iter"] = entry["iter"]
    if section == "checkpoints":
        return dict(_numbers("checkpoint", values))
    event = f"events/{entry.get('kind')}"
    return {event: 1, **dict(_numbers(event, values))}


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """(name, number) of a number, or of each in a dict. A null, which stands for a NaN, too, is none."""
    if isinstance(value, dict):
        for part, inside in value.items():
            yield from _numbers(f"{name}/{part}", inside)
    elif isinstance(value, (int, float)):
        yield name, +value  # True is 1


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
