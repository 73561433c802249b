"""Prevents two training runs in one out_dir: rank 0 holds a lock on out_dir/run.lock for as long as it lives.

It is a POSIX lock (lockf): the system releases it however the process ends, and it works across machines on
NFS. Not flock: forked data workers would inherit that and keep it for seconds after their parent was killed.
The trap of lockf: closing any descriptor of the file releases the lock, so nothing else here opens the file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import TextIO

from common.errors import UserError

NAME = "run.lock"
WAIT_SECONDS = 3.0  # for a process that was just killed: its lock is freed last, after gigabytes of memory
RETRY_SECONDS = 0.1
HELD = (errno.EACCES, errno.EAGAIN)  # errors that mean: another process holds the lock

log = logging.getLogger("nanomfu")


class RunLock:
    """A context manager that releases the lock, if acquire() was called."""

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        self.file: TextIO | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_) -> None:
        if self.file:
            self.file.close()
            self.file = None

    def acquire(self) -> None:
        """Locks out_dir, which must exist. Raises UserError if another run holds the lock. The file's text
        names the holder for people to read; the system knows whether the file is locked, not its text."""
        path = self.out_dir / NAME
        try:
            self.file = file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+")
        except OSError as error:
            raise _not_writable(self.out_dir, error) from None
        until = time.monotonic() + WAIT_SECONDS
        while not _lock(file):
            if time.monotonic() > until:
                holder = file.read().strip() or "(which has not said its number)"
                raise UserError(
                    f"out_dir={str(self.out_dir)!r} is in use by process {holder}; stop that run, or choose "
                    f"another --out_dir. If its machine is gone and a network disk keeps its lock: rm {path}"
                )
            time.sleep(RETRY_SECONDS)
        try:
            file.truncate(0)
            file.write(f"{os.getpid()} on {socket.gethostname()}, started {_now()}\n")
            file.flush()
        except OSError as error:
            raise _not_writable(self.out_dir, error) from None


def _lock(file: TextIO) -> bool:
    """Whether this process now has the lock; True, too, if the disk knows no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            return False
        log.warning("%s cannot be locked (%s): nothing prevents a second run in this out_dir", NAME, error)
    return True


def check_writable(out_dir: Path) -> None:
    """Makes out_dir and writes a byte there. Raises UserError. Rank 0 only, before any expensive work."""
    probe = out_dir / f".write_test_{os.getpid()}"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"out_dir={str(out_dir)!r} cannot be written: {error}; choose another --out_dir"
        ) from None


def _not_writable(out_dir: Path, error: OSError) -> UserError:
    return UserError(f"out_dir={str(out_dir)!r} cannot be written: {error}; choose another --out_dir")


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
