"""Ends a rank of a real train.py run under torchrun, and measures how soon the run goes on.

    python -m bench.recovery config/quickstart.py --processes=2
    python -m bench.recovery config/quickstart.py --goodput=60 --every=300

For each fault: the seconds until the first iteration after the resume is in the record, those of training
that are repeated, what the record itself says of both, and how long each step of the restart takes, by the
function of train.py that it ends with. 'machine' kills torchrun with all ranks and starts the same command
again; SIGSTOP includes the watchdog's timeout.
--goodput trains for so many minutes, makes the same iterations again with a SIGKILL every so many seconds,
and compares the time and the bits. Any --key=value of train.py goes to all runs.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.process import end_with_status, from_root
from bench.table import about_this, heading, new_folder, save_table
from common.arguments import real_number, user_path, whole_number
from common.errors import RunError, UserError
from common.json_file import read_json
from common.processes import is_running
from common.run_records import run_records
from common.text import aligned
from training.checkpoints.folder import step_folders
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
    """One run under torchrun, and what its ranks have marked."""

    def __init__(self, folder: Path, processes: int, argv: list[str]):
        folder.mkdir(parents=True)
        self.folder, self.log = folder, folder / "console.log"
        self.path, self.read = folder / "marks.jsonl", 0
        self.marks: dict[str, list[dict]] = defaultdict(list)  # of all attempts, by name
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
        for one in map(json.loads, lines):
            self.marks[one["mark"]].append(one)
        return not ended

    def wait_for(self, name: str, count: int = 1, old: dict[int, int] | None = None) -> dict:
        """The mark of this number among those of rank 0, without old processes. RunError if none comes."""
        until = time.monotonic() + WAIT_S
        while self.is_running() and time.monotonic() < until:
            found = [one for one in self.marks[name] if one["rank"] == 0 and one["pid"] not in (old or {})]
            if len(found) >= count:
                return found[count - 1]
        raise RunError(f"no {name} came within {WAIT_S:.0f} s, or the run failed; see {self.log}")

    def ranks(self) -> dict[int, int]:
        """{process: rank} of the newest attempt."""
        newest = {one["rank"]: one["pid"] for one in self.marks["python"]}
        return {pid: rank for rank, pid in newest.items()}

    def end_rank(self, fault: str) -> None:
        """Ends the last rank, or all."""
        if number := FAULTS[fault]:
            os.kill(max((rank, pid) for pid, rank in self.ranks().items())[1], number)
        else:
            self.kill()
            self.start()

    def kill(self) -> None:
        """All processes, if torchrun is there."""
        if self.torchrun.poll() is None:
            self.torchrun.kill()
            for pid in filter(is_running, self.ranks()):
                os.kill(pid, signal.SIGKILL)
            self.torchrun.wait()

    def recoveries(self) -> list[dict]:
        """What the record's attempts say, without the first."""
        return [one["recovery"] for one in read_json(max(run_records(self.folder)))["attempts"][1:]]


def measure(fault: str, launch: Launch) -> dict[str, Any]:
    """One fault, once a checkpoint is complete, and what the restart took."""
    launch.wait_for("saved")
    launch.wait_for("write", LEAST_ROWS)
    old, began = launch.ranks(), time.time()
    launch.end_rank(fault)
    ended = began
    while any(map(is_running, old)) and launch.is_running() and not set(launch.ranks()) - set(old):
        ended = time.time()
    first = launch.wait_for("write", old=old)
    if fault == "exception":  # it comes after a row
        began = max(one["time"] for one in launch.marks["write"] if one["pid"] in old)
    before = max(ended, began)
    steps = {"ranks end": before - began}
    its = [one for marks in launch.marks.values() for one in marks if one["pid"] == first["pid"]]
    for one in sorted(its, key=lambda one: one["time"]):
        if one["time"] <= first["time"]:
            steps[one["mark"]], before = one["time"] - before, one["time"]
    rows = [one for one in launch.marks["write"] if one["pid"] in old and one["time"] <= began]
    kept = [one for one in rows if one["iter"] < first["iter"]]
    return {
        "seconds_to_first_iteration": first["time"] - began,
        "iterations_repeated": max(rows[-1]["iter"] + 1 - first["iter"], 0),
        "seconds_repeated": began - max(one["time"] for one in kept),
        "steps": steps,
        "record": launch.recoveries()[-1],
    }


def goodput(folder: Path, processes: int, argv: list[str], minutes: float, every_s: float) -> dict[str, Any]:
    """The iterations of so many minutes without a fault, made again with kills. Raises RunError."""
    whole, began = Launch(folder / "whole", processes, argv), time.time()
    whole.wait_for("write")  # a stop before the first iteration saves nothing
    time.sleep(max(0.0, began + 60 * minutes - time.time()))
    whole.torchrun.terminate()  # the run saves what it has
    whole.torchrun.wait()
    iterations, files = newest_checkpoint(whole.folder)
    unkilled_s, began = time.time() - began, time.time()
    killed, kills = Launch(folder / "killed", processes, [*argv, f"--max_iters={iterations}"]), 0
    while killed.is_running():
        # each kill ends training, no start; where a start takes longer, training goes on all the same
        rows = [one["time"] for one in killed.marks["write"] if one["pid"] in killed.ranks()]
        if rows and time.time() - (rows[0] if kills else began) > every_s:
            with contextlib.suppress(ProcessLookupError):  # of a rank that has ended by itself
                killed.end_rank("SIGKILL")
                kills += 1
    seconds = time.time() - began
    if killed.torchrun.returncode or not kills:
        raise RunError(f"the second run failed, or ended before a kill: see {killed.log}")
    found = [one for one in killed.recoveries() if one["seconds_to_first_row"]]
    cost = sum(one["seconds_to_first_row"] + one["seconds_repeated"] for one in found) / max(len(found), 1)
    return {
        "iterations": iterations,
        "seconds_without_kills": unkilled_s,
        "seconds_with_kills": seconds,
        "goodput_percent": 100 * unkilled_s / seconds,
        "kills": kills,
        "seconds_per_kill": cost,
        "same_bits": newest_checkpoint(killed.folder) == (iterations, files),
    }


def newest_checkpoint(folder: Path) -> tuple[int, dict[str, dict]]:
    """(its iteration, {file of tensors: hash})."""
    newest = step_folders(folder / "checkpoints")[-1]
    files = read_json(newest / "manifest.json")["files"]
    tensors = {name: digest for name, digest in files.items() if name.startswith("tensors")}
    return int(newest.name.removeprefix("step-")), tensors


# --- the command ---


def lines_of(content: dict[str, Any]) -> list[str]:
    rows = []
    for name, result in content["faults"].items():
        seconds = {
            "to iteration": result["seconds_to_first_iteration"],
            "repeated": result["seconds_repeated"],
            "record: to row": result["record"]["seconds_to_first_row"],
            "record: repeated": result["record"]["seconds_repeated"],
        }
        figures = {step: f"{value:.2f}" for step, value in (seconds | result["steps"]).items()}
        rows.append({"fault, seconds": name, **figures})
    table = (
        aligned(list(rows[0]), [list(row.values()) for row in rows], ("fault, seconds",), "github")
        if rows
        else []
    )
    table += [f"{name}: {value}" for name, value in content.get("goodput", {}).items()]
    return [*heading(content, f"recovery, processes: {content['processes']}"), "", *table]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(this program's options, the flags of train.py)."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.recovery", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("config", type=user_path, help="config file of train.py")
    add("--processes", type=whole_number(1, 10**4), default=1, help="of the run (1)")
    add("--fault", action="append", choices=FAULTS, help="only this one; may be repeated (all)")
    add("--goodput", type=real_number(0.1, 10**4), metavar="MINUTES", help="of training, with many kills")
    add("--every", type=real_number(1, 10**6), default=300, help="seconds between two of them (300)")
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
    if options.goodput:
        content["goodput"] = goodput(folder / "runs", processes, run, options.goodput, options.every)
        save_table(folder, content, lines_of(content))
    else:
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
