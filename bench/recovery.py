"""Ends a rank of a real train.py run under torchrun, and measures how soon the run goes on.

    python -m bench.recovery config/quickstart.py --processes=2

For each fault: the seconds until the first iteration after the resume is in the record, those of training
that are repeated, what the record itself says of both, and how long each step of the restart takes, by the
function of train.py that it ends with. 'machine' kills torchrun with all ranks and starts the same command
again; SIGSTOP includes the watchdog's timeout. Any --key=value of train.py goes to all runs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.process import end_with_status, from_root
from bench.table import about_this, heading, new_folder, save_table, table_of
from common.arguments import user_path, whole_number
from common.errors import RunError, UserError
from common.json_file import read_json
from common.processes import is_running
from common.run_records import run_records
from training.configuration.flags import take_flags
from training.configuration.keys import ROOT

FAULTS = {"SIGKILL": signal.SIGKILL, "exception": signal.SIGUSR2, "SIGSTOP": signal.SIGSTOP, "machine": None}
# a flag of the user takes the place of one of these
DEFAULTS = """--init_from=auto --eval_interval=0 --checkpoint_interval=10 --keep_last=1 --log_interval=1
    --lr_schedule=constant --max_iters=1000000 --timeout_minutes=0.5""".split()
LEAST_ROWS = 25  # before a fault
WAIT_S = 300.0  # for a checkpoint, or for the resume
POLL_S = 0.02


class Launch:
    """One run under torchrun, and what its ranks have marked: name, time, iter, rank, pid."""

    def __init__(self, folder: Path, processes: int, argv: list[str]):
        folder.mkdir(parents=True)
        self.folder, self.log = folder, folder / "console.log"
        self.path, self.read = folder / "marks.jsonl", 0
        self.marks: list[dict] = []  # of all attempts
        launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
        launcher += [f"--nproc_per_node={processes}", str(ROOT / "bench/recovery_worker.py"), str(self.path)]
        self.command = [sys.executable, *launcher, *argv, f"--out_dir={from_root(folder)}"]
        self.path.touch()
        self.start()
        atexit.register(self.kill)

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.torchrun = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)

    def is_running(self) -> bool:
        """Waits a moment, and reads new marks."""
        ended = self.torchrun.poll() is not None
        time.sleep(POLL_S)
        with open(self.path, "rb") as file:
            file.seek(self.read)
            lines = [line for line in file if line.endswith(b"\n")]
        self.read += sum(map(len, lines))
        self.marks += map(json.loads, lines)
        return not ended

    def wait_for(self, name: str, count: int = 1, without: tuple[int, ...] = ()) -> dict:
        """The mark of this number among those of rank 0, without old processes. RunError if none comes."""
        until = time.monotonic() + WAIT_S
        while self.is_running() and time.monotonic() < until:
            found = [one for one in self.marks if (one["mark"], one["rank"]) == (name, 0)]
            found = [one for one in found if one["pid"] not in without]
            if len(found) >= count:
                return found[count - 1]
        raise RunError(f"no {name} came within {WAIT_S:.0f} s, or the run failed; see {self.log}")

    def processes(self) -> tuple[int, ...]:
        """Those of the newest attempt, by rank."""
        newest = {one["rank"]: one["pid"] for one in self.marks if one["mark"] == "python"}
        return tuple(pid for _, pid in sorted(newest.items()))

    def kill(self) -> None:
        """All processes, if torchrun is there."""
        if self.torchrun.poll() is None:
            self.torchrun.kill()
            for pid in filter(is_running, self.processes()):
                os.kill(pid, signal.SIGKILL)
            self.torchrun.wait()


def measure(fault: str, launch: Launch) -> dict[str, Any]:
    """One fault of the last rank or of all, once a checkpoint is complete, and what the restart took."""
    launch.wait_for("saved")
    launch.wait_for("write", LEAST_ROWS)
    old, began = launch.processes(), time.time()
    if number := FAULTS[fault]:
        os.kill(old[-1], number)
    else:
        launch.kill()
        launch.start()
    ended = began
    while any(map(is_running, old)) and launch.is_running() and not {*launch.processes()} - {*old}:
        ended = time.time()
    first = launch.wait_for("write", without=old)
    rows = [one for one in launch.marks if one["mark"] == "write" and one["pid"] in old]
    if fault == "exception":  # it comes after a row
        began = max(one["time"] for one in rows)
    before = max(ended, began)
    steps = {"ranks end": before - began}
    for one in sorted(
        (one for one in launch.marks if one["pid"] == first["pid"]), key=lambda one: one["time"]
    ):
        if one["time"] <= first["time"]:
            steps[one["mark"]], before = one["time"] - before, one["time"]
    rows = [one for one in rows if one["time"] <= began]
    record = read_json(max(run_records(launch.folder)))
    return {
        "seconds_to_first_iteration": first["time"] - began,
        "iterations_repeated": max(rows[-1]["iter"] + 1 - first["iter"], 0),
        "seconds_repeated": began - max(one["time"] for one in rows if one["iter"] < first["iter"]),
        "steps": steps,
        "record": record["attempts"][-1]["recovery"],
    }


# --- the command ---


def lines_of(content: dict[str, Any]) -> list[str]:
    rows = [
        {
            "fault, seconds": name,
            "to iteration": result["seconds_to_first_iteration"],
            "repeated": result["seconds_repeated"],
            "record: to row": result["record"]["seconds_to_first_row"],
            "record: repeated": result["record"]["seconds_repeated"],
            **result["steps"],
        }
        for name, result in content["faults"].items()
    ]
    columns = {name: "" if name == "fault, seconds" else ".2f" for name in rows[0]}
    title = f"recovery, processes: {content['processes']}"
    return [*heading(content, title), "", *table_of(columns, rows, ("fault, seconds",))]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this program's options, the flags of train.py)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.recovery", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("config", type=user_path, help="config file of train.py")
    add("--processes", type=whole_number(1, 10**4), default=1, help="of the run (1)")
    add("--fault", action="append", choices=FAULTS, help="only this one; may be repeated (all)")
    add("--output", type=user_path, help="a new folder (default: out-bench/recovery_DATE_TIME)")
    flags, rest = take_flags(argv)
    options = parser.parse_args(rest)
    if options.processes == 1 and "SIGSTOP" in (options.fault or []):
        raise UserError("--fault=SIGSTOP: another rank must notice it; add --processes=2")
    return options, flags


def main(argv: list[str]) -> int:
    options, flags = parse(argv)
    folder, processes = new_folder(options.output, "recovery"), options.processes
    run = [from_root(Path(options.config)), *DEFAULTS, *flags]
    content = {**about_this("bench.recovery", argv), "processes": processes, "faults": {}}
    for fault in options.fault or [one for one in FAULTS if processes > 1 or one != "SIGSTOP"]:
        launch = Launch(folder / "runs" / fault, processes, run)
        content["faults"][fault] = measure(fault, launch)
        launch.kill()
        shutil.rmtree(launch.folder / "checkpoints")
        save_table(folder, content, lines_of(content))
    print("\n".join([*lines_of(content), "", f"Saved in {folder}"]))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the runs, too
    sys.exit(end_with_status(main, sys.argv[1:]))
