"""Ends a rank of a real train.py run under torchrun, and measures how soon the run goes on.

    python -m bench.recovery config/quickstart.py --processes=2
    python -m bench.recovery config/quickstart.py --goodput=60 --every=300

For each fault: the seconds until the first iteration after the resume is in the record, those of training
that are repeated, what the record itself says of both, and how long each step of the restart takes. 'machine'
kills torchrun with all ranks and starts the same command again; SIGSTOP includes the watchdog's timeout.
--goodput trains for so many minutes, makes the same iterations again with a SIGKILL every so many seconds,
and compares the time and the bits. Any --key=value of train.py goes to all runs.
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

from bench.process import end_with_status, failure_reason, from_root
from bench.table import about_this, heading, new_folder, save_table
from common.arguments import real_number, user_path, whole_number
from common.errors import RunError
from common.json_file import read_json
from common.processes import is_running
from common.run_records import run_records
from common.text import aligned
from training.checkpoints.folder import step_folders
from training.configuration.flags import take_flags
from training.configuration.keys import ROOT

FAULTS = ("SIGKILL", "exception", "SIGSTOP", "machine")
# of a restart: name, and the mark of bench/recovery_worker.py that ends it; before them, the old ranks end
STEPS = {
    "launcher": "python",
    "imports": "imports",
    "inputs": "check_inputs",
    "join": "join_ranks",
    "verify": "find_resume",
    "build": "build_step",
    "load": "load_resume",
    "open record": "begin_record",
    "first iteration": "write",
}
DEFAULTS = (  # a flag of the user takes their place
    *(
        "--init_from=auto",
        "--eval_interval=0",
        "--checkpoint_interval=10",
        "--keep_last=1",
        "--log_interval=1",
    ),
    *("--lr_schedule=constant", "--max_iters=1000000", "--timeout_minutes=0.5"),
)
WAIT_S = 300.0  # for a checkpoint, or for the resume
POLL_S = 0.01


class Launch:
    """One run under torchrun, and what its ranks have marked."""

    def __init__(self, folder: Path, processes: int, argv: list[str]):
        folder.mkdir(parents=True)
        self.folder, self.path = folder, folder / "marks.jsonl"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
        launcher += [f"--nproc_per_node={processes}", str(ROOT / "bench/recovery_worker.py"), str(self.path)]
        self.command = [sys.executable, *launcher, *argv, f"--out_dir={from_root(folder)}"]
        self.start()
        atexit.register(self.kill)

    def start(self) -> None:
        with open(self.folder / "console.log", "ab") as console:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": console}
            self.torchrun = subprocess.Popen(self.command, cwd=ROOT, **streams, start_new_session=True)

    def marks(self, name: str) -> list[dict]:
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        return [one for one in map(json.loads, lines) if one["mark"] == name]

    def wait_for(self, name: str, old: dict[int, int], least: int = 0) -> dict:
        """The first such mark of a rank 0 that is not an old process. Raises RunError if none comes."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and self.torchrun.poll() is None:
            for one in self.marks(name):
                if one["rank"] == 0 and one["pid"] not in old and one.get("iter", least) >= least:
                    return one
            time.sleep(POLL_S)
        with open(self.folder / "console.log", encoding="utf-8", errors="replace") as lines:
            raise RunError(f"no {name}: {failure_reason(1, lines)}")

    def ranks(self) -> dict[int, int]:
        """{process: rank} of the newest attempt."""
        return {pid: rank for rank, pid in {one["rank"]: one["pid"] for one in self.marks("python")}.items()}

    def end_rank(self, fault: str) -> float:
        """Ends the last rank. Returns when."""
        ranks, began = self.ranks(), time.time()
        pid, rank = max(ranks.items(), key=lambda item: item[1])
        if fault == "exception":
            self.path.with_suffix(".raise").write_text(str(rank))
            while not self.marks("raised"):
                time.sleep(POLL_S)
            return self.marks("raised")[-1]["time"]
        if fault == "machine":
            self.kill()
            self.start()
        else:
            os.kill(pid, getattr(signal, fault))
        return began

    def kill(self) -> None:
        if self.torchrun.poll() is None:
            self.torchrun.kill()
            for pid in filter(is_running, self.ranks()):
                os.kill(pid, signal.SIGKILL)
            self.torchrun.wait()

    def attempts(self) -> list[dict]:
        return read_json(max(run_records(self.folder)))["attempts"]


def measure(fault: str, launch: Launch, at: int) -> dict[str, Any]:
    """One fault, from iteration `at` on, once a checkpoint is complete; what the restart took."""
    launch.wait_for("saved", {})
    launch.wait_for("write", {}, least=at)
    old, ended = launch.ranks(), 0.0
    began = launch.end_rank(fault)
    while any(map(is_running, old)) and not set(launch.ranks()) - set(old):
        ended = time.time()
        time.sleep(POLL_S)
    first = launch.wait_for("write", old)
    before = max(ended, began)
    steps = {"ranks end": before - began}
    for step, name in STEPS.items():
        mark = next(one["time"] for one in launch.marks(name) if one["pid"] == first["pid"])
        steps[step], before = mark - before, mark
    rows = [one for one in launch.marks("write") if one["pid"] in old and one["time"] < began]
    twice = max(rows[-1]["iter"] + 1 - first["iter"], 0)
    pace = (rows[-1]["time"] - rows[0]["time"]) / max(rows[-1]["iter"] - rows[0]["iter"], 1)
    return {
        "seconds_to_first_iteration": first["time"] - began,
        "iterations_repeated": twice,
        "seconds_repeated": pace * twice,
        "steps": steps,
        "record": launch.attempts()[-1]["recovery"],
    }


# --- a run with many kills ---


def goodput(folder: Path, processes: int, argv: list[str], minutes: float, every_s: float) -> dict[str, Any]:
    """The iterations of so many minutes without a fault, made again with kills. Raises RunError."""
    whole = Launch(folder / "whole", processes, argv)
    time.sleep(60 * minutes)
    whole.torchrun.terminate()  # the run saves what it has
    whole.torchrun.wait()
    last, began = whole.marks("write")[-1], whole.marks("python")[0]["time"]
    killed = Launch(folder / "killed", processes, [*argv, f"--max_iters={last['iter'] + 1}"])
    kills, start = 0, time.time()
    while killed.torchrun.poll() is None:
        if time.time() - start > every_s * (kills + 1) and all(map(is_running, killed.ranks())):
            killed.end_rank("SIGKILL")
            kills += 1
        time.sleep(POLL_S)
    seconds = time.time() - start
    if killed.torchrun.returncode:
        raise RunError(f"the run with kills failed: see {killed.folder}/console.log")
    found = [one["recovery"] for one in killed.attempts()[1:]]
    # an attempt that was killed before its first row has none
    costs = [
        one["seconds_to_first_row"] + one["seconds_repeated"] for one in found if one["seconds_to_first_row"]
    ]
    return {
        "iterations": last["iter"] + 1,
        "seconds": [last["time"] - began, seconds],
        "kills": kills,
        "seconds_per_kill": sum(costs) / len(costs),
        "goodput_percent": 100 * (last["time"] - began) / seconds,
        "goodput_percent_of_a_kill_in_300_s": 100 * (1 - sum(costs) / len(costs) / 300),
        "same_bits": tensors(whole.folder) == tensors(killed.folder),
        "costs": costs,
    }


def tensors(folder: Path) -> dict[str, dict]:
    """{file: hash} of the newest checkpoint."""
    files = read_json(step_folders(folder / "checkpoints")[-1] / "manifest.json")["files"]
    return {name: digest for name, digest in files.items() if name.startswith("tensors")}


# --- the command ---


def cells(name: str, result: dict[str, Any]) -> dict[str, str]:
    record = result["record"]
    return {
        "fault": name,
        "to iteration s": f"{result['seconds_to_first_iteration']:.1f}",
        "repeated s": f"{result['seconds_repeated']:.1f} ({result['iterations_repeated']})",
        "record": f"{record['seconds_to_first_row']:.1f}, {record['seconds_repeated']:.1f}",
        **{step: f"{seconds:.2f}" for step, seconds in result["steps"].items()},
    }


def lines_of(content: dict[str, Any]) -> list[str]:
    rows = [cells(name, result) for name, result in content["faults"].items() if "steps" in result]
    table = aligned(list(rows[0]), [list(row.values()) for row in rows], ("fault",), "github") if rows else []
    table += [
        f"{name}: {result['reason']}" for name, result in content["faults"].items() if "reason" in result
    ]
    table += [f"{name}: {value}" for name, value in content.get("goodput", {}).items()]
    return [*heading(content, f"recovery, processes: {content['processes']}"), "", *table]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recovery", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add, seconds = parser.add_argument, real_number(1, 10**6)
    add("config", type=user_path, help="config file of train.py")
    add("--processes", type=whole_number(1, 10**4), default=1, help="of the run (1)")
    add("--fault", action="append", choices=FAULTS, help="only this one; may be repeated (all)")
    add("--at", type=whole_number(1, 10**9), default=25, help="iteration from which on it comes (25)")
    add("--goodput", type=real_number(0.1, 10**4), metavar="MINUTES", help="of training, with many kills")
    add("--every", type=seconds, default=300, help="seconds between two of them (300)")
    add("--output", type=user_path, help="a new folder (default: out-bench/recovery_DATE_TIME)")
    flags, rest = take_flags(argv)
    options = parser.parse_args(rest)
    folder = new_folder(options.output, "recovery")
    run = [from_root(Path(options.config)), *DEFAULTS, *flags]
    content = {**about_this("bench.recovery", argv), "processes": options.processes, "faults": {}}
    if options.goodput:
        many = options.goodput, options.every
        content["goodput"] = goodput(folder / "runs", options.processes, run, *many)
    for fault in [] if options.goodput else options.fault or FAULTS:
        if (fault, options.processes) == ("SIGSTOP", 1):
            content["faults"][fault] = {"reason": "no other rank is there to notice it"}
            continue
        launch = Launch(folder / "runs" / fault, options.processes, run)
        try:
            content["faults"][fault] = measure(fault, launch, options.at)
        except RunError as error:
            content["faults"][fault] = {"reason": str(error)}
        finally:
            launch.kill()
            shutil.rmtree(launch.folder / "checkpoints", ignore_errors=True)
        save_table(folder, content, lines_of(content))
    save_table(folder, content, lines_of(content))
    print("\n".join([*lines_of(content), "", f"Saved in {folder}"]))
    return 0 if options.goodput else int(not any("steps" in one for one in content["faults"].values()))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the runs, too
    sys.exit(end_with_status(main, sys.argv[1:]))
