"""Runs a command in a fresh process, with a time limit, and says in one line why it failed.

Fresh, because the allocator, compiler caches and CUDA contexts of one measurement change the next one. The
compile cache, too, is a new folder each time: the first step then always includes compilation, and no code
that was compiled for another variant is used again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from common.command import FAILED, outcome, prepare_output, say
from common.text import one_line, shorten
from training.configuration.keys import ROOT
from training.process.exit_status import leave_now
from training.process.launch import launch_info

STOP_GRACE_S = 40  # torchrun gives its workers 30 s before it kills them
TIMEOUT_MAX_S = 30 * 24 * 3600  # a month, for --timeout
REASON_LENGTH = 300  # characters; the log has the rest
LINE_LENGTH = 10_000  # a longer line of a log is read in parts


class Outcome(NamedTuple):
    """How a process ended."""

    seconds: float
    reason: str | None  # why it failed; None if it succeeded


def python_command(target: list[str], processes: int) -> list[str]:
    """The command that runs a script or ['-m', module], under torchrun if it needs several processes."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *(torchrun if processes > 1 else []), *target]


def from_root(path: Path) -> str:
    """How a process that starts in the repository's root names this path: relative if it is inside, so that a
    record tells nothing of the machine's other folders."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def run_process(command: list[str], log: Path, timeout_s: float, keep_cache: bool = False) -> Outcome:
    """Runs command in the repository's root, writes its output to `log`, and stops it after timeout_s. Its
    compile cache is the machine's own with keep_cache, else a new folder."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # train.py sets this itself; a peer must have it, too
    environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    new_folder = tempfile.TemporaryDirectory(prefix="nanomfu-", ignore_cleanup_errors=True)
    with new_folder as cache, open(log, "w", encoding="utf-8") as output:
        if not keep_cache:
            environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        began = time.perf_counter()
        # in a session of its own: Ctrl-C reaches only this process, which then stops the other one
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return Outcome(timeout_s, f"not done after {timeout_s:g} s, stopped; see --timeout")
        finally:
            stop(process)
    seconds = time.perf_counter() - began
    with open(log, encoding="utf-8", errors="replace") as lines:
        return Outcome(seconds, failure_reason(process.returncode, lines))


def stop(process: subprocess.Popen) -> None:
    """SIGTERM comes first: torchrun's workers have sessions of their own, and only torchrun can end them."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure_reason(status: int, output: TextIO) -> str | None:
    """Why a process with this exit status failed, in one line: the first 'error: ...' in its output (where
    several ranks report one, the first is closest to the cause), or else its last line. None for status 0.
    The output may have any length: no more than a line of it is held."""
    if status == 0:
        return None
    last = "it said nothing"
    while line := output.readline(LINE_LENGTH):
        if error := re.match(r"(?:\[rank \d+\] )?error: (.+)$", line):
            return one_line(error[1], REASON_LENGTH)
        last = line if line.strip() else last
    killed = f"killed by {signal.Signals(-status).name}; last line: " if status < 0 else ""
    return one_line(killed + last, REASON_LENGTH)


def end_with_status(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """The exit status of a process that runs main(argv), as every command ends, and the ranks of one do. An
    error is printed as a line that failure_reason() finds."""
    prepare_output()
    try:
        status, message = outcome(main, argv)
    except Exception as error:
        first_line = shorten(str(error).strip().split("\n")[0], REASON_LENGTH)
        status, message = FAILED, f"{traceback.format_exc()}error: {type(error).__name__}: {first_line}"
    rank, _, world_size = launch_info()
    if message:
        say(message if world_size == 1 else f"[rank {rank}] {message}")
    if status and world_size > 1:
        leave_now(status)  # other ranks may be waiting in a collective; torchrun stops them
    return status
