"""Ends a rank of a real train.py run under torchrun, and reads from the record how soon the run goes on.

    python -m bench.recovery config/quickstart.py --processes=2

For each fault: the seconds between the last log row before it and the first one after the resume, and those
of training that are repeated. 'machine' kills torchrun with all ranks and starts the same command again;
SIGSTOP includes the watchdog's timeout. Any --key=value of train.py goes to all runs. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.process import end_with_status, from_root
from bench.table import about_this, heading, new_folder, save_table, table_of
from common.arguments import user_path, whole_number
from common.errors import RunError, UserError
from common.run_records import load_record, run_records
from training.configuration.flags import take_flags
from training.configuration.keys import ROOT

FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "machine": None}
# a flag of the user takes the place of one of these
DEFAULTS = """--init_from=auto --eval_interval=0 --checkpoint_interval=10 --keep_last=1 --log_interval=1
    --lr_schedule=constant --max_iters=1000000 --timeout_minutes=0.5""".split()
LEAST_ROWS = 25  # before a fault
WAIT_S, POLL_S = 300.0, 0.1  # for these rows and a checkpoint, or for the resume; between two looks
# fields of attempts[].recovery in the record
COLUMNS = {"fault": "", "seconds_to_first_row": ".2f", "seconds_repeated": ".2f", "iterations_repeated": "d"}


def main(argv: list[str]) -> int:
    options, flags = parse(argv)
    folder, processes = new_folder(options.output, "recovery"), options.processes
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1000"]
    torchrun += [
        f"--nproc_per_node={processes}",
        "train.py",
        from_root(Path(options.config)),
        *DEFAULTS,
        *flags,
    ]
    content = {**about_this("bench.recovery", argv), "processes": processes, "faults": {}}
    for fault in options.fault or [one for one in FAULTS if processes > 1 or one != "SIGSTOP"]:
        print(f"{fault}: started", flush=True)
        launch = Launch(torchrun, folder / "runs" / fault)
        try:
            content["faults"][fault] = launch.measure(FAULTS[fault])
        finally:
            launch.kill()
            shutil.rmtree(launch.out_dir / "checkpoints", ignore_errors=True)
        rows = [{"fault": name, **found} for name, found in content["faults"].items()]
        lines = [*heading(content, f"recovery, processes: {processes}"), "", *table_of(COLUMNS, rows)]
        save_table(folder, content, lines)
    print("\n".join(["", *lines, "", f"Saved in {folder}"]))
    return 0


class Launch:
    """A run under torchrun."""

    def __init__(self, command: list[str], out_dir: Path):
        out_dir.mkdir(parents=True)
        self.command, self.out_dir = [sys.executable, *command, f"--out_dir={from_root(out_dir)}"], out_dir
        self.start()

    def start(self) -> None:
        with open(self.out_dir / "console.log", "ab") as log:
            self.torchrun = subprocess.Popen(self.command, cwd=ROOT, stdout=log, stderr=log)

    def measure(self, number: signal.Signals | None) -> dict[str, Any]:
        """What the record says of the recovery from a signal to the last rank; without one from the loss of
        all processes. It comes once a checkpoint is complete."""
        self.wait_for(lambda found: found["checkpoints"] and len(found["training_iterations"]) >= LEAST_ROWS)
        if number:
            os.kill(self.ranks()[-1], number)
        else:
            self.kill()
            self.start()
        record = self.wait_for(lambda found: found["attempts"][-1]["recovery"]["seconds_to_first_row"])
        return record["attempts"][-1]["recovery"]

    def wait_for(self, there: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """The record, when it has this. Raises RunError if the run ends, or if it never has."""
        until = time.monotonic() + WAIT_S
        while self.torchrun.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # it has just begun
                if there(record := load_record(max(run_records(self.out_dir)))):
                    return record
            time.sleep(POLL_S)
        raise RunError(
            f"the run failed, or took more than {WAIT_S:.0f} s; see {self.out_dir / 'console.log'}"
        )

    def ranks(self) -> list[int]:
        """The processes of train.py."""
        pid = self.torchrun.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(one) for one in children if b"train.py" in Path(f"/proc/{one}/cmdline").read_bytes()]

    def kill(self) -> None:
        if self.torchrun.poll() is None:
            ranks = self.ranks()
            for pid in (self.torchrun.pid, *ranks):
                os.kill(pid, signal.SIGKILL)
            self.torchrun.wait()


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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the runs, too
    sys.exit(end_with_status(main, sys.argv[1:]))
