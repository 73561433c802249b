"""What test_preemption.py and test_failures.py share: a run with a fault in it, and what is left of it."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support import warm_python
from support.helpers import ROOT, TINY, checkpoint_tensors, make_dataset, write_config

ITERATIONS, INTERVAL = 24, 8  # of a run; between its evaluations and checkpoints
ORPHAN_SECONDS = 8  # a data worker looks every 5 s whether its process is still there


@dataclass
class Ended:
    """A run that is over."""

    status: int
    seconds: float  # since the fault, if there was one
    output: str  # of all processes
    out: Path

    @property
    def steps(self) -> list[int]:
        return sorted(
            int(path.name.removeprefix("step-")) for path in self.out.glob("checkpoints/step-????????")
        )

    def record(self) -> dict:
        paths = sorted(self.out.glob("run_*.json"), key=lambda path: path.stat().st_mtime_ns)
        return json.loads(paths[-1].read_text())

    def digest(self, step: int | None = None) -> str:
        """sha256 of every tensor of a checkpoint, the newest: weights, moments, generators."""
        sha256 = hashlib.sha256()
        folder = self.out / "checkpoints" / f"step-{step or self.steps[-1]:08d}"
        for name, tensor in sorted(checkpoint_tensors(folder).items()):
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
    timeout: float = 100,
    **env: str,
) -> Ended:
    """Under torchrun if there are several processes. Fails if it does not end or leaves a process behind."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
            *torchrun,
        ]
    command = [*launcher, "tests/support/fault_worker.py", str(config), f"--out_dir={out}", *flags]
    return run_command(command, out, timeout, FAULT=fault, **env)


def run_command(command: list[str], out: Path, timeout: float, **env: str) -> Ended:
    log = out.with_name(f"{out.name}.console")
    began = time.time()
    with open(log, "w") as file:
        process = warm_python.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
            ended_at = time.time()
        finally:
            left = [] if process.poll() is None else wait_for_end(out)
            for pid in [*processes_of(out), *([process.pid] if process.poll() is None else [])]:
                os.kill(pid, signal.SIGKILL)
    output = log.read_text()
    fault = re.search(r"FAULT at (\d+\.\d+)s", output)  # the ranks write into one file
    ended = Ended(status, ended_at - (float(fault[1]) if fault else began), output, out)
    assert not left, f"still there: {left}\n{ended.output[-3000:]}"
    return ended


def wait_for_end(out: Path) -> list[int]:
    """Processes of that out_dir that do not end by themselves."""
    until = time.monotonic() + ORPHAN_SECONDS
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
