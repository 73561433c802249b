"""Ends a process: every error becomes one message and one exit status, and nothing can delay the end.

Once it is decided that the process ends, a disk may be full, a reader of our output dead and the launcher
stopped. So every write from there on goes through within(), and os._exit follows in any case.

0 complete · 1 failed · 2 an error that the user can fix · 128 + n stopped by signal n, after saving

The words for an end, in names and messages, and the record's status where a run has one:

complete  all of it was done, or is written: a run ("completed"), its record, a checkpoint
stop      a run was asked to end, and all ranks do after the same iteration ("interrupted")
fail      an error of a rank ends the run ("failed")
end       a process is over, whatever the reason ("killed", if its record still says "running")
leave     this process ends at once, and no destructor runs
close     an object gives back what it holds, however the run ended
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from common.command import FAILED, INTERRUPTED, USER_ERROR
from common.errors import NO_MEMORY, RunError, UserError, is_out_of_memory
from common.text import MESSAGE_CHARACTERS, plain, shorten
from training.process.console import write_to_log_file
from training.process.launch import launch_info
from training.process.redaction import redact
from training.process.torch_build import version_warnings
from training.process.world import World

# Each asks a run to save and to end. Only the training process itself reacts, not its data workers.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
RANK_0_SPEAKS_FIRST_S = 3.0  # the others wait, so that rank 0 alone prints an error that every rank has
JOINED_S = 0.5  # the same once all have joined, as they are in the same iteration then
WRITE_TIMEOUT_S = 2.0  # for one of the last writes: a pipe or a file system may never take it

Result = TypeVar("Result")


class OtherRankFailed(RunError):
    """A collective failed because of another rank. The watchdog has printed the reason, once a machine."""


# --- errors ---


def end_with(error: BaseException) -> int:
    """Prints why the run ends and returns the exit status.

    With several ranks, this process ends at once: the others may be waiting for it in a collective, and a
    normal exit would wait for them. torchrun stops the others as soon as this process has ended.
    """
    status, message = _describe(error)
    message = shorten(plain(redact(message)), MESSAGE_CHARACTERS)
    rank, _, world_size = launch_info()
    is_cause = not isinstance(error, OtherRankFailed)
    within(WRITE_TIMEOUT_S, write_to_log_file, message)
    if status == FAILED and is_cause:
        tell_launcher(message)
    if rank != 0 or not is_cause:
        # torchrun may end this process in this time
        time.sleep(JOINED_S if is_cause and dist.is_initialized() else RANK_0_SPEAKS_FIRST_S)
    if status == USER_ERROR:
        tell_launcher(message)
    if is_cause and (rank == 0 or status != INTERRUPTED):
        print_last(message)
    if world_size > 1:
        leave_now(status)
    return status


WORKER_HINT = (
    "if the kernel killed it for want of memory, lower --dataloader_num_workers or "
    "--dataloader_prefetch_factor, or read without workers: --use_dataloader=False"
)


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
            "state a lower --batch_size (with gradient_accumulation_steps='auto' the tokens stay), "
            "or shard with --use_fsdp=True"
        )
        return FAILED, f"error: out of GPU memory; {hint}\n{error}"
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
        # torch raises it from a signal handler, so anywhere in the loop
        return FAILED, f"error: {error}; {WORKER_HINT}"
    if is_out_of_memory(error):
        hint = "lower --batch_size, --block_size or --gradient_accumulation_steps"
        return FAILED, f"error: {NO_MEMORY}; {hint}\n{error}"
    if compiler := _missing_compiler(error):
        hint = "install g++ and the headers of Python (apt install g++ python3-dev), or set --compile=False"
        return USER_ERROR, f"error: torch.compile has no compiler that works; {hint}\n{compiler}"
    lines = "".join(traceback.format_exception(error))
    hint = "".join(f"\nwarning: {text}" for text in version_warnings())
    return FAILED, f"{lines}error: {type(error).__name__}: {error}{hint}"


def _missing_compiler(error: BaseException) -> str | None:
    """What torch.compile says of the C or C++ compiler of this machine, if that is why it failed."""
    inner = getattr(error, "inner_exception", error)  # of torch's BackendCompilerFailed
    says = str(inner)
    is_missing = type(inner).__name__ == "InvalidCxxCompiler" or "Failed to find C compiler" in says  # Triton
    does_not_work = type(inner).__name__ == "CppCompileError" and "fatal error:" in says  # a missing header
    return says.split("\n\nSet TORCH")[0] if is_missing or does_not_work else None


def tell_launcher(message: str) -> None:
    """Puts the message into torchrun's summary, if that can be written. torchrun takes the earliest message
    for the root cause. So call this at once, and only on a rank that is the cause itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        within(WRITE_TIMEOUT_S, _write_error_file, Path(path), message)


def _write_error_file(path: Path, message: str) -> None:
    """Writes the whole file or none: torchrun itself fails if it finds half of one."""
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    try:
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    except OSError:
        if path.is_file():  # and no device
            path.unlink()


# --- the last calls of a process ---


def print_last(message: str) -> None:
    """Prints on stderr, if stderr takes it, with the rank if there are several."""
    rank, _, world_size = launch_info()
    text = message if world_size == 1 else f"[rank {rank}] {message}"
    within(WRITE_TIMEOUT_S, lambda: print(text, file=sys.stderr, flush=True))


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
    try:
        for flush in (lambda: sys.stderr.flush(), lambda: sys.stdout.flush(), logging.shutdown):
            within(WRITE_TIMEOUT_S, flush)
    finally:
        os._exit(status)


def within(seconds: float, action: Callable[..., Result], *arguments: object) -> Result | None:
    """Calls `action` and returns after `seconds` at the latest. Returns its result; None if it has not
    returned by then, or has raised an error."""
    results: list[Result] = []

    def run() -> None:
        with contextlib.suppress(BaseException):
            results.append(action(*arguments))

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError):  # no further thread can be had, and without one `action` may hang
        return None
    thread.join(seconds)
    return results[0] if results else None
