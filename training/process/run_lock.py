"""Prevents two training runs in one out_dir: rank 0 holds a lock on out_dir/run.lock for as long as it lives
(common/file_lock.py), so nothing else here opens that file."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from datetime import datetime
from pathlib import Path

from common.durable_file import create
from common.errors import RunError, UserError, os_error_text
from common.file_lock import take_lock

NAME = "run.lock"
WAIT_SECONDS = 3.0  # for a process that was just killed: its lock is freed last, after gigabytes of memory
RETRY_SECONDS = 0.1
MAX_TEXT = 1000  # bytes that are shown of the holder's text
NO_LOCKS = "nothing prevents a second run in this out_dir"


class RunLock:
    """A context manager that releases the lock, if acquire() was called."""

    def __init__(self, out_dir: Path):
        self.out_dir = out_dir
        self.path = out_dir / NAME
        self.descriptor: int | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_) -> None:
        if self.descriptor is not None:
            with contextlib.suppress(OSError):  # a full disk does not change how the run ended
                os.close(self.descriptor)
            self.descriptor = None

    def acquire(self) -> None:
        """Locks out_dir, which must exist. Raises UserError if another run holds the lock. The file's text
        names the holder for people to read; the system knows whether the file is locked, not its text."""
        try:
            self.descriptor = descriptor = _open(self.path)
        except OSError as error:
            raise _not_writable(self.out_dir, error) from None
        until = time.monotonic() + WAIT_SECONDS
        while not take_lock(descriptor, self.path, NO_LOCKS):
            if time.monotonic() > until:
                text = os.pread(descriptor, MAX_TEXT, 0).decode(errors="replace")
                holder = text.strip() or "(which has not said its number)"
                raise UserError(
                    f"out_dir={str(self.out_dir)!r} is in use by process {holder}; stop that run, or choose "
                    "another --out_dir. If its machine is gone and a network disk keeps its lock: "
                    f"rm {self.path}"
                )
            time.sleep(RETRY_SECONDS)
        try:
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}, started {_now()}\n".encode())
        except OSError as error:
            raise _not_writable(self.out_dir, error) from None

    def is_lost(self) -> bool:
        """Whether out_dir was removed, or replaced by another, while this run held the lock."""
        if self.descriptor is None:
            return False
        try:
            found = self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a network disk that does not answer now
            return False
        held = os.fstat(self.descriptor)
        return (found.st_dev, found.st_ino) != (held.st_dev, held.st_ino)

    def check(self) -> None:
        """Raises RunError if the lock is lost: another run may have begun in a folder of the same name."""
        if self.is_lost():
            raise RunError(
                f"out_dir={str(self.out_dir)!r} was removed or replaced while this run used it: its {NAME} "
                "is gone, so nothing more is written there, and what this run had saved there is gone, too. "
                "Start again, in another --out_dir if another run uses this one"
            )


def _open(path: Path) -> int:
    """Opens a regular file that is nowhere else: no link, and no second name of a file outside."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise OSError(f"{NAME} is no file of its own; remove it: rm {path}")
    return descriptor


def check_writable(folder: Path) -> None:
    """Makes out_dir, or takes a folder in it, and writes a byte there. Raises UserError. Rank 0 only, before
    any expensive work."""
    probe = folder / f".write_test_{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with create(probe) as file:
            file.write(b"x")
        probe.unlink()
    except OSError as error:
        raise _not_writable(folder, error) from None


def _not_writable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"out_dir={str(folder)!r} cannot be written: {os_error_text(error)}; choose another --out_dir"
    )


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
