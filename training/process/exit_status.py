"""Ends a process: every error becomes one message and one exit status, and nothing can delay the end.

0 completed · 1 failed · 2 an error that the user can fix · 128 + n stopped by signal n, after saving
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from training.configuration.errors import RunError, UserError
from training.process.console import write_to_log_file
from training.process.redaction import redact
from training.process.world import World, launch_info

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130
RANK_0_SPEAKS_FIRST_S = 3.0  # the others wait, so that rank 0 alone prints an error that every rank has
FLUSH_TIMEOUT_S = 2.0  # for writing buffered output: a file system that hangs may never take it


class OtherRankFailed(RunError):
    """A collective failed because of another rank. That rank reports the reason itself."""


# --- errors ---


def end_with(error: BaseException) -> int:
    """Prints why the run ends and returns the exit status.

    With several ranks, this process ends at once: the others may be waiting for it in a collective, and a
    normal exit would wait for them. torchrun stops the others as soon as this process has ended.
    """
    status, message = _describe(error)
    message = redact(message)
    rank, _, world_size = launch_info()
    is_cause = not isinstance(error, OtherRankFailed)
    write_to_log_file(message)
    if status == FAILED and is_cause:
        tell_launcher(message)
    if rank != 0 or not is_cause:
        time.sleep(RANK_0_SPEAKS_FIRST_S)  # torchrun may end this process in this time
    if status == USER_ERROR:
        tell_launcher(message)
    if rank == 0 or status != INTERRUPTED:
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print(message if world_size == 1 else f"[rank {rank}] {message}", file=sys.stderr, flush=True)
    if world_size > 1:
        leave_now(status)
    return status


def _describe(error: BaseException) -> tuple[int, str]:
    """(exit status, message)."""
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C before the watchdog has taken over the signals
        return INTERRUPTED, "interrupted"
    if isinstance(error, UserError):
        return USER_ERROR, f"error: {error}"
    if isinstance(error, RunError):
        return FAILED, f"error: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        hint = (
            "lower --batch_size (raise --gradient_accumulation_steps to keep the tokens), "
            "or shard with --use_fsdp=True"
        )
        return FAILED, f"error: out of GPU memory; {hint}\n{error}"
    lines = "".join(traceback.format_exception(error))
    return FAILED, f"{lines}error: {type(error).__name__}: {error}"


def tell_launcher(message: str) -> None:
    """Puts the message into torchrun's summary. torchrun takes the earliest message for the root cause. So
    call this at once, and only on a rank that is the cause itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


# --- the last calls of a process ---


def end_process(world: World, status: int = 0) -> None:
    """The last call of a run that ends in order. All ranks. With several ranks it does not return.

    It ends the process without destroying gloo groups: Python would hold the interpreter lock meanwhile, and
    a group's own thread may need that lock to free a tensor; then neither ends (seen with torch 2.13).
    """
    if world.size == 1:
        return
    dist.barrier()
    if dist.get_backend() == "nccl":
        dist.destroy_process_group()  # NCCL warns about groups that are left open
    leave_now(status)


def leave_now(status: int) -> NoReturn:
    """Flushes the output and ends this process at once: no atexit and no destructor runs, as they may
    wait."""
    within(FLUSH_TIMEOUT_S, _flush)
    os._exit(status)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def within(seconds: float, action: Callable, *arguments: object) -> None:
    """Calls `action` and returns after `seconds` at the latest, whether `action` has returned or not. An
    error that it raises is ignored."""

    def run():
        with contextlib.suppress(Exception):
            action(*arguments)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
