"""Reads a JSON file that anybody may have written or damaged."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 1 << 30  # far above any record or listing that we write; a reader may ask for less
MAX_DEPTH = 64  # levels; a record of ours has 6. What walks through a file may call itself for each


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file. Its fields are still to be checked.

    Raises FileNotFoundError (also for a dangling link), another OSError if it cannot be read, and ValueError
    for anything else: no regular file (a named pipe would block for ever), too large, not UTF-8, not JSON,
    nested too deep, a number of too many digits, or no JSON object.
    """
    return parse_object(read_regular(path, max_bytes))


def parse_object(content: bytes, unique: bool = False) -> dict[str, Any]:
    """The JSON object in these bytes, which may begin with a byte order mark. Raises ValueError; with
    `unique` also if an object names something twice, of which Python would take the last."""
    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    level: list[dict | list] = [value]
    for _ in range(MAX_DEPTH):
        inside = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inside if isinstance(item, (dict, list))]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it names {name[:100]!r} twice")
        found[name] = value
    return found


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file. Raises OSError, or ValueError if it is something else or too large."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"it has {size:,} bytes, more than {max_bytes:,}")
        content = file.read()  # file.read(max_bytes) would take so much memory for the smallest file
    if len(content) > max_bytes:
        raise ValueError(f"it grows, and has more than {max_bytes:,} bytes now")
    return content


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to read. Raises OSError, or ValueError if it is something else: a named pipe would
    block for ever, and a device has no end."""
    # O_NONBLOCK: opening a named pipe without a writer would block
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise ValueError("it is not a regular file")
    return open(descriptor, "rb")
