"""Writes files so that, after a crash or a power failure, each is either whole or not there."""

import json
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Returns when the file's content is on disk."""
    with open(path, "r+b") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Returns when the names of the folder's files are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_bytes(content)
    sync(temporary)
    os.replace(temporary, path)


def write_json(path: Path, content: dict) -> None:
    """As write_bytes; the new name is also on disk when this returns."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode("utf-8"))
    sync_folder(path.parent)
