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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from common.command import FAILED, outcome, prepare_output, say
from common.text import one_line, shorten
from training.configuration.keys import ROOT
from training.process.exit_status import leave_now
from training.process.launch import launch_info

STOP_GRACE_S = 40  # torchrun gives its workers 30 s before it kills them
TIMEOUT_MAX_S = 30 * 24 * 3600  # a month, for --timeout
REASON_LENGTH = 300  # characters; the log has the rest
LINE_LENGTH = 10_000  # a longer line of a log is read in parts


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    seconds: float
    reason: str | None  # why it failed; None if it succeeded


def python_command(target: list[str], processes: int) -> list[str]:
    """The command that runs a script or ['-m', module], under torchrun if it needs several processes."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return launcher + target


def from_root(path: Path) -> str:
    """How a process that starts in the repository's root names this path: relative if it is inside, so that a
    record tells nothing of the machine's other folders."""
    path = path.resolve()
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def run_process(
    command: list[str],
    log: Path,
    timeout_s: float,
    keep_cache: bool = False,
    variables: Mapping[str, str] | None = None,
    started: Callable[[subprocess.Popen], None] = lambda process: None,
) -> Outcome:
    """Runs command in the repository's root, writes its output to `log`, and stops it after timeout_s. Its
    compile cache is the machine's own with keep_cache, else a new folder. `variables` are added to its
    environment; `started` is told its process."""
    with contextlib.ExitStack() as stack:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
        # train.py sets this itself; a peer must have it, too
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if not keep_cache:
            folder = tempfile.TemporaryDirectory(prefix="nanomfu-", ignore_cleanup_errors=True)
            cache = stack.enter_context(folder)
            environment |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        output = stack.enter_context(open(log, "w", encoding="utf-8"))
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the other one
        )
        timed_out = False
        started(process)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _stop(process)
    seconds = time.perf_counter() - began
    if timed_out:
        return Outcome(seconds, f"not done after {timeout_s:g} s, stopped; see --timeout")
    with open(log, encoding="utf-8", errors="replace") as lines:
        return Outcome(seconds, failure_reason(process.returncode, lines))


def _stop(process: subprocess.Popen) -> None:
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
    reason, is_error = "it said nothing", False
    while not is_error and (line := output.readline(LINE_LENGTH)):
        if found := re.match(r"(?:\[rank \d+\] )?error: (.+)$", line):
            reason, is_error = found[1], True
        elif line.strip():
            reason = line
    if status < 0 and not is_error:
        reason = f"killed by {signal.Signals(-status).name}; last line: {reason}"
    return one_line(reason, REASON_LENGTH)


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
