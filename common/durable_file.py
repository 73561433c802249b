"""Writes files so that, after a crash or a power failure, each is either whole or not there; and never
through a link, which may lead to a file of somebody else."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from io import BufferedWriter
from pathlib import Path


def create(path: Path) -> BufferedWriter:
    """Opens a new, empty file. A file or a link that has this name is removed first; what a link leads to
    is not touched."""
    path.unlink(missing_ok=True)
    return open(path, "xb")


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces the file in one step: a reader sees the old content or the new one."""
    _replace(path, [content], f"{path.name}.tmp{os.getpid()}")


def replace_file(path: Path, parts: Iterable[bytes], temporary: str) -> None:
    """As write_bytes, by way of a file of this name; the new name is also on disk when this returns."""
    _replace(path, parts, temporary)
    sync_folder(path.parent)


def _replace(path: Path, parts: Iterable[bytes], temporary_name: str) -> None:
    temporary = path.with_name(temporary_name)
    try:
        with create(temporary) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise _naming(path, error) from None


def _naming(path: Path, error: BaseException) -> BaseException:
    """The error with the name that its reader knows, instead of the temporary one."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, str(path))
    return error


def write_json(path: Path, content: dict) -> None:
    """As write_bytes; the new name is also on disk when this returns."""
    write_bytes(path, (json.dumps(content, indent=2) + "\n").encode("utf-8"))
    sync_folder(path.parent)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to be filled, under another name. It gets its own when the block ends, and is deleted if that
    fails. `path`: new, or an empty folder."""
    path = path.resolve()
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise _naming(path, error) from None
    try:
        yield temporary
        for found in temporary.rglob("*"):
            sync_folder(found) if found.is_dir() else sync(found)
        sync_folder(temporary)
        os.rename(temporary, path)  # it replaces an empty folder, and fails if there is anything in it
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


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
