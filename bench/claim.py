"""One run of several processes that share a folder: the first that comes does it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from common.file_lock import take_lock

NO_LOCKS = "nothing prevents two processes from doing the same; start one at a time with this folder"


@contextlib.contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether no other process has claimed this path. The claim lasts until the end of the block, or of the
    process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        yield take_lock(file.fileno(), path, NO_LOCKS)
