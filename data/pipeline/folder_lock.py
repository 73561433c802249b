"""Lets only one preparation at a time write into a dataset folder, by a lock on .prepare.lock. The system
releases a lock however the process ends, on network disks too."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError

NAME = ".prepare.lock"


@contextlib.contextmanager
def only_preparation(folder: Path) -> Iterator[None]:
    """While this runs, no other preparation writes into the folder. Raises UserError if one does."""
    lock = _lock(folder / NAME)
    if lock is None:
        raise UserError(f"another preparation is at work in {folder}; wait for it, or pass another --output")
    try:
        yield
    finally:
        try:
            (folder / NAME).unlink(missing_ok=True)  # while it is locked: a finished dataset needs none
        finally:
            os.close(lock)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed; None if another process has it. Nothing is written
    into the file, and a link is not followed."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            may_not = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            fix = "name a folder into which you may write with --output" if may_not else "remove it"
            raise UserError(f"{path} cannot be opened: {error.strerror}; {fix}") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{path} is not a regular file; remove it")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            print(f"warning: {path} cannot be locked ({error.strerror}): start no second preparation there")
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                return descriptor
        os.close(descriptor)  # removed by the preparation that had it: lock the file that is there now
