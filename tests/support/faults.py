"""A run with a fault in it, and what is left of it."""

import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from support.helpers import (
    HANG_S,
    TINY,
    checkpoint_tensors,
    last_run,
    make_dataset,
    start_train,
    write_config,
)

ITERATIONS, INTERVAL = 24, 8  # of a run; between its evaluations and checkpoints
WORKER = "tests/support/fault_worker.py"


@dataclass
class Ended:
    """A run that is over."""

    out: Path
    status: int
    seconds: float  # since the fault, if there was one
    output: str  # of all processes

    @property
    def steps(self) -> list[int]:
        return saved_steps(self.out)

    def record(self) -> dict:
        return last_run(self.out)

    def digest(self) -> str:
        return digest(self.out, self.steps[-1])


def saved_steps(out: Path, folder: str = "checkpoints") -> list[int]:
    folders = out.glob(f"{folder}/step-????????")
    return sorted(int(path.name.removeprefix("step-")) for path in folders)


def digest(out: Path, step: int) -> str:
    """sha256 of every tensor of a checkpoint: weights, moments, generators."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(checkpoint_tensors(out / "checkpoints" / f"step-{step:08d}").items()):
        sha256.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return sha256.hexdigest()


def prepare(folder: Path, **keys) -> Path:
    """A config file with `keys` over a tiny run's."""
    make_dataset(folder / "tokens")
    run = {"max_iters": ITERATIONS, "eval_interval": INTERVAL, "dropout": 0.1, "dataset": folder / "tokens"}
    settings = {**TINY, **run, **keys}
    return write_config(folder / "run.py", **settings)


def run_with_fault(
    config: Path,
    out: Path,
    *flags: str,
    fault: str = "",
    processes: int = 2,
    torchrun: tuple = (),
    timeout: float = HANG_S,
    **env: str,
) -> Ended:
    """Under torchrun if there are several processes. Fails if it does not end or leaves a process behind."""
    how = {"processes": processes, "torchrun": torchrun, "script": WORKER, "FAULT": fault, **env}
    flags = (f"--out_dir={out}", *flags)
    return wait_for_all(
        out, timeout, lambda log: start_train(config, *flags, stdout=log, stderr=subprocess.STDOUT, **how)
    )


def wait_for_all(out: Path, timeout: float, start: Callable[[IO], subprocess.Popen]) -> Ended:
    """start(log) starts a run that writes into this file."""
    log = out.with_name(f"{out.name}.console")
    began = time.time()
    with open(log, "w") as file:
        process = start(file)
        try:
            status = process.wait(timeout)
            ended_at = time.time()
        finally:
            left = [] if process.poll() is None else wait_for_end(out)
            for pid in [*processes_of(out), *([process.pid] if process.poll() is None else [])]:
                os.kill(pid, signal.SIGKILL)
    output = log.read_text()
    fault_at = re.search(r"FAULT at (\d+\.\d+)s", output)  # the ranks write into one file
    ended = Ended(out, status, ended_at - (float(fault_at[1]) if fault_at else began), output)
    assert not left, f"still there: {left}\n{ended.output[-3000:]}"
    return ended


def wait_for_end(out: Path) -> list[int]:
    """Processes of that out_dir that do not end by themselves."""
    until = time.monotonic() + HANG_S  # a data worker looks every 5 s whether its process is still there
    while (left := processes_of(out)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def processes_of(out: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"--out_dir={out}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            pass
    return found
