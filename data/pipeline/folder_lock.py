"""Lets only one preparation at a time write into a dataset folder, by a lock on .prepare.lock. The system
releases a lock however the process ends, on network disks too; the empty file stays."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError

NAME = ".prepare.lock"


@contextlib.contextmanager
def only_preparation(folder: Path) -> Iterator[None]:
    """While this runs, no other preparation writes into the folder. Raises UserError if one does."""
    path = folder / NAME
    try:  # a link is not followed, a named pipe does not block, and nothing is written
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        fix = "remove it, or name a folder into which you may write with --output"
        raise UserError(f"{path} cannot be opened: {error.strerror}; {fix}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"another preparation is at work in {folder}; wait for it, or pass another --output"
        ) from None
    except OSError as error:
        print(f"warning: {path} cannot be locked ({error.strerror}): start no second preparation there")
    try:
        yield
    finally:
        os.close(descriptor)
