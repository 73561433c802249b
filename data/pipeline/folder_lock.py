"""Lets only one preparation at a time write into a dataset folder; the parts of one preparation count as one.

Every preparation locks .prepare.lock: exclusively, or, if it is one of several parts, together with the other
parts. A part also locks its own .part-K-of-N.lock, which shows into how many parts the others divide the
work. The system releases a lock however the process ends, on network disks too.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError

NAME = ".prepare.lock"
FINISH = ".part-finish.lock"


@contextlib.contextmanager
def only_preparation(folder: Path) -> Iterator[None]:
    """While this runs, no other preparation writes into the folder. Raises UserError if one does."""
    lock = _lock(folder / NAME, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        raise _busy(folder)
    try:
        yield
    finally:
        try:
            (folder / NAME).unlink(missing_ok=True)  # while it is locked: a finished dataset needs none
        finally:
            os.close(lock)


@contextlib.contextmanager
def one_part(folder: Path, part: int, num_parts: int) -> Iterator[None]:
    """While this runs, only other parts of the same number of parts write into the folder. Raises
    UserError."""
    if num_parts == 1:
        with only_preparation(folder):
            yield
        return
    own = f".part-{part}-of-{num_parts}.lock"
    with contextlib.ExitStack() as locks:
        for name, kind in ((own, fcntl.LOCK_EX), (NAME, fcntl.LOCK_SH)):
            lock = _lock(folder / name, kind | fcntl.LOCK_NB)
            if lock is None and name == own:
                raise UserError(f"another process is at work on part {part} of {folder}; wait for it")
            if lock is None:
                raise _busy(folder)
            locks.callback(os.close, lock)
        # After its own is locked: of two that begin at once, at least one sees the other.
        for other in _parts_at_work(folder):
            if other != num_parts:
                raise UserError(
                    f"another preparation is at work in {folder}, in {other} parts instead of {num_parts}; "
                    "wait for it, or pass another --output"
                )
        yield


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other part is in such a section."""
    lock = _lock(folder / FINISH, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        print(f"waiting for another part that looks at {folder}")
        lock = _lock(folder / FINISH, fcntl.LOCK_EX)
    assert lock is not None, folder
    try:
        yield
    finally:
        os.close(lock)


def _busy(folder: Path) -> UserError:
    return UserError(f"another preparation is at work in {folder}; wait for it, or pass another --output")


def _parts_at_work(folder: Path) -> Iterator[int]:
    """The number of parts of each part that is being made."""
    for path in folder.glob(".part-*-of-*.lock"):
        if not (named := re.fullmatch(r"\.part-\d+-of-(\d+)\.lock", path.name)):
            continue
        lock = _lock(path, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if lock is None:
            yield int(named[1])
        else:
            os.close(lock)


def _lock(path: Path, kind: int) -> int | None:
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
            fcntl.flock(descriptor, kind)
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
