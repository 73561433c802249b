"""One run of several processes that share a folder: the first that comes does it."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether no other process has claimed this path. The claim lasts until the end of the block, or of the
    process, however that ends: it is a POSIX lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            yield False
        else:
            yield True
