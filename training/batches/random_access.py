"""Reads pieces of files at any place.

The trap: memory-mapping would be shorter, but reading a page of a file that was truncated after it was mapped
ends the process with SIGBUS, without a message. Here, a file that has become shorter is an error with its
name.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from common.errors import RunError

# Of all datasets together: a process may have 1024 files open, and a dataset can have thousands of shards.
OPEN_FILES = 256


def read_bytes(path: Path, size: int, first: int, count: int) -> bytes:
    """`count` bytes from byte `first` on. size: of the file when the run started. Raises RunError."""
    try:
        file = _open(path, size)
        content = os.pread(file.descriptor, count, first)
    except OSError as error:
        raise RunError(f"{path} cannot be read any more: {error}") from None
    if len(content) != count:
        raise _changed(path, size, os.fstat(file.descriptor).st_size)
    return content


def request(path: Path, size: int, first: int, count: int) -> None:
    """Asks the operating system to read this piece, without waiting for it."""
    try:
        file = _open(path, size)
        _advise(file.descriptor, first, count, "POSIX_FADV_WILLNEED")
    except OSError as error:
        raise RunError(f"{path} cannot be read any more: {error}") from None


def forget_open_files() -> None:
    """The next read opens its file again: it may have been replaced."""
    _open.cache_clear()


class _OpenFile:
    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self):
        os.close(self.descriptor)


@functools.lru_cache(OPEN_FILES)
def _open(path: Path, size: int) -> _OpenFile:
    # O_NONBLOCK: a named pipe that has taken the file's place would block for ever
    file = _OpenFile(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    found = os.fstat(file.descriptor).st_size
    if found != size:
        raise _changed(path, size, found)
    # do not read ahead: the next piece is somewhere else
    _advise(file.descriptor, 0, 0, "POSIX_FADV_RANDOM")
    return file


def _advise(descriptor: int, first: int, count: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(descriptor, first, count, getattr(os, advice))


def _changed(path: Path, size: int, found: int) -> RunError:
    return RunError(f"{path} had {size:,} bytes when the run started and has {found:,} now")
