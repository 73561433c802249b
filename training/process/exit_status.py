"""How a process ends: every error as one message and one exit status. 0 is completed, 1 failed, 2 an error
that the user can fix, 128 + n stopped by signal n, after saving."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback

import torch

from training.configuration.errors import RunError, UserError
from training.process.console import write_to_log_file
from training.process.redaction import redact
from training.process.world import launch_info, leave_now, tell_launcher

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130
RANK_0_SPEAKS_FIRST = 3.0  # seconds; an error that every rank has is printed once, by rank 0


class OthersFailed(RunError):
    """A collective failed because of another rank, which has said or will say why."""


def end_with(error: BaseException) -> int:
    """Says why and gives the status. A rank of several ends at once: the others may be waiting for it in a
    collective, and a normal exit would wait for them; torchrun stops them as soon as this one is gone."""
    status, message = _describe(error)
    message = redact(message)
    rank, _, world_size = launch_info()
    is_own = not isinstance(error, OthersFailed)
    write_to_log_file(message)
    if status == FAILED and is_own:
        tell_launcher(message)
    if rank != 0 or not is_own:
        time.sleep(RANK_0_SPEAKS_FIRST)  # torchrun may end it meanwhile
    if status == USER_ERROR:
        tell_launcher(message)
    if rank == 0 or status != INTERRUPTED:
        with contextlib.suppress(OSError):  # it may be a file on a full disk
            print(message if world_size == 1 else f"[rank {rank}] {message}", file=sys.stderr, flush=True)
    if world_size > 1:
        leave_now(status)
    return status


def _describe(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt):  # Ctrl-C before training/faults/watchdog.py has taken over
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
