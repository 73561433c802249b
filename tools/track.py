"""Sends a run record to experiment trackers: all attempts, each figure once.

    python -m tools.track out-quickstart/run_20260101_120000.json --trackers=tensorboard,wandb

The trackers of the run itself get only what they lack; the others get everything. The newest record in an
out_dir is the whole run.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from common.arguments import user_folder
from common.command import FAILED, run_command
from common.errors import UserError
from training.configuration.rules import TRACKERS, named_trackers, require_tracker
from training.process.console import start_logging
from training.process.run_lock import RunLock
from training.records.attempts import read_record
from training.trackers.sender import Trackers

TIMEOUT_S = 600.0  # for all trackers together

log = logging.getLogger("nanomfu")


def main(argv: list[str]) -> int:
    options = parse(argv)
    names = named_trackers(options.trackers)
    if not names:
        raise UserError(f"--trackers is empty; name one or more of {','.join(TRACKERS)}")
    for name in names:
        require_tracker(name)
    start_logging(None)
    with RunLock(options.record.parent) as lock:
        record = read(options.record, options.project)
        lock.acquire()  # a run that is alive sends its figures itself
        trackers = Trackers(names, record, options.record, live=False)
        trackers.close(str(record.get("status")), record.get("summary") or {}, TIMEOUT_S)
    failed = False
    for sender in trackers.senders or ():
        failed = failed or sender.error is not None
        if sender.error is None:
            print(f"{sender.name}: sent {sender.steps:,} iterations of {sender.run.unique_name}")
    return FAILED if failed else 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.track", description="Sends a run record to experiment trackers."
    )
    parser.add_argument(
        "record", metavar="RUN.json", type=user_folder, help="a run record, out_dir/run_*.json"
    )
    parser.add_argument("--trackers", required=True, help="one or more of wandb,tensorboard,trackio")
    parser.add_argument("--project", help="the project in the trackers; without it, the run's wandb_project")
    return parser.parse_args(argv)


def read(path: Path, project: str | None) -> dict:
    """The record, with what an older one lacks. Raises UserError."""
    try:
        record = read_record(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read as a run record: {error}; name a file out_dir/run_*.json"
        ) from None
    config = record.get("config")
    record["config"] = dict(config) if isinstance(config, dict) else {}
    if project:
        record["config"]["wandb_project"] = project
    record["attempts"] = record.get("attempts") or [{"attempt": 1, "run_name": record["run_name"]}]
    if not isinstance(record.get("summary"), dict):
        record["summary"] = {}
    return record


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
