"""Remembers which token files have been read completely and had the hash that meta.json records.

Hash and largest id are kept in .verified.json beside the files, so that each file is read once and not at
every start. A file need not be read again while its size, its modification time and the hash in meta.json are
the same. The process that writes a file knows its hash, so a new dataset is not read again. A copy is, unless
the copying kept the times. The trap: a failing disk can change the content but not the size and the time;
`python -m data.inspect NAME --hash` always reads.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.cgroups import usable_cores
from common.durable_file import write_bytes
from common.errors import UserError
from common.json_file import open_regular, read_json
from data.pipeline.token_files import LENGTH_DTYPE, largest_id, lengths_files, stored_dtype

MEMORY, LOCK = ".verified.json", ".verified.lock"
READ_BYTES = 1 << 24  # that each thread reads at a time
THREADS = 16  # files that are read at the same time; hashing releases the interpreter lock
REMEMBER_SECONDS = 10.0  # between the times at which results are stored while files are read
LARGE = 10**9  # bytes; reading more takes seconds, so a progress bar is shown

log = logging.getLogger("nanomfu")


def entry(path: Path, dtype: str, written: dict) -> dict:
    """What to remember of a file; while the stamp is the same, it need not be read again. written: what
    meta.json says of it. Call this before the file is read, so that a change meanwhile is noticed."""
    stat, sha256 = path.stat(), written.get("sha256")
    return {"stamp": [stat.st_size, stat.st_mtime_ns, dtype, sha256], "max_id": written.get("max_id")}


def recall(folder: Path) -> dict[str, dict]:
    """{name: {"stamp", "max_id"}} of the files that have been read; damaged entries are left out."""
    try:
        memory = read_json(folder / MEMORY)
    except (OSError, ValueError):
        return {}
    return {
        name: e
        for name, e in memory.items()
        if isinstance(e, dict) and type(e.get("max_id")) is int and isinstance(e.get("stamp"), list)
    }


def remember(folder: Path, entries: dict[str, dict]) -> None:
    """Add entries to .verified.json. In a folder that cannot be written, files are read again each time."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network disks lock no folders
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            for remains in folder.glob(f"{MEMORY}.tmp*"):  # of a process that was killed; others wait
                remains.unlink()
            write_bytes(folder / MEMORY, json.dumps({**recall(folder), **entries}).encode())
        finally:
            os.close(descriptor)


def remember_files(folder: Path, dtype: str, files: dict[str, dict]) -> None:
    """Remembers token files that were just written, and their files of lengths."""
    listed = [(dtype, *each) for each in files.items()]
    listed += [(LENGTH_DTYPE, *each) for each in lengths_files(files).items()]
    remember(folder, {name: entry(folder / name, kind, file) for kind, name, file in listed})


def forget(folder: Path, names: Set[str]) -> None:
    """The files with these names are read again before they are used."""
    if names & recall(folder).keys():
        remember(folder, {name: {"stamp": ["damaged"], "max_id": 0} for name in names})


def wrong_size(folder: Path, dtype: str, files: dict[str, dict]) -> str | None:
    """Which token file, or file of lengths, is not there or has another size than meta.json says."""
    for kind, listed in ((dtype, files), (LENGTH_DTYPE, lengths_files(files))):
        for name, file in listed.items():
            path, size = folder / name, file["tokens"] * stored_dtype(kind).itemsize
            if not path.is_file():
                return f"{path} is missing or not a regular file"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size:,} bytes, meta.json says {size:,}"
    return None


def remembered(folder: Path, dtype: str, files: dict[str, dict]) -> dict[str, int]:
    """{name: largest id} of the files that were read before and have not changed since. files: {name: what
    meta.json says of it}"""
    known = recall(folder) if files else {}
    return {
        name: known[name]["max_id"]
        for name in known.keys() & files.keys()
        if known[name]["stamp"] == entry(folder / name, dtype, files[name])["stamp"]
    }


def read_files(
    folder: Path, dtype: str, files: dict[str, dict], names: Iterable[str]
) -> Iterator[tuple[str, str, int, bool]]:
    """(name, sha256, largest id, whether meta.json says the same) of these files, in the order in which they
    are finished. Good ones are remembered while others are read: after a stop, the next start goes on."""
    entries = {name: entry(folder / name, dtype, files[name]) for name in names}
    good, remembered_at = {}, time.monotonic()
    try:
        for path, sha256, max_id in read_whole([folder / name for name in entries], stored_dtype(dtype)):
            said = files[path.name]
            same = (sha256, max_id) == (said.get("sha256", sha256), said.get("max_id", max_id))
            if same:
                good[path.name] = entries[path.name] | {"max_id": max_id}
            yield path.name, sha256, max_id, same
            if good and time.monotonic() - remembered_at > REMEMBER_SECONDS:
                remember(folder, good)
                remembered_at = time.monotonic()
    finally:
        if good:
            remember(folder, good)


def damaged_files(
    folder: Path, dtype: str, files: dict[str, dict], again: bool = False, vocab_size: int | None = None
) -> set[str]:
    """The names of the files that are not what meta.json says of them, and of files of lengths beside them. A
    file is read unless it is remembered; with `again`, in any case. UserError for ids outside of the
    vocabulary."""
    damaged = set()
    for kind, described in ((dtype, files), (LENGTH_DTYPE, lengths_files(files))):
        known = {} if again else remembered(folder, kind, described)
        for name, _, max_id, same in read_files(folder, kind, described, described.keys() - known.keys()):
            if not same:
                damaged.add(name)
            elif kind == dtype and vocab_size is not None and max_id >= vocab_size:
                says = f"meta.json says vocab_size {vocab_size:,}"
                raise UserError(f"{folder / name} contains token id {max_id:,}, but {says}")
    return damaged


@contextlib.contextmanager
def one_reader(folder: Path) -> Iterator[None]:
    """Waits until no other process reads the files of this folder, on other machines with the same disk, too;
    what it has found need not be read again. If the folder cannot be locked, several read at a time."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(folder / LOCK, flags, 0o644)
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("Waiting for another process, which reads the token files in %s", folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read_whole(paths: list[Path], dtype: np.dtype) -> Iterator[tuple[Path, str, int]]:
    """(path, sha256, largest id) of each file, in the order in which the files are finished."""
    if not paths:
        return
    stop, lock = threading.Event(), threading.Lock()
    size = sum(path.stat().st_size for path in paths)
    seconds = 0.5 if sys.stderr.isatty() else 30  # between lines of progress
    bar = tqdm(
        total=size, unit="B", unit_scale=True, desc="Reading", mininterval=seconds, disable=size < LARGE
    )

    def progress(count: int) -> None:
        with lock:
            bar.update(count)

    with bar, ThreadPoolExecutor(min(THREADS, usable_cores())) as pool:
        futures = {pool.submit(scan, path, dtype, progress, stop): path for path in paths}
        try:
            for future in as_completed(futures):
                yield (futures[future], *future.result())
        finally:  # the first bad file, or Ctrl-C, ends the others
            stop.set()
            pool.shutdown(cancel_futures=True)


def scan(
    path: Path, dtype: np.dtype, progress: Callable[[int], None], stop: threading.Event
) -> tuple[str, int]:
    """(sha256, largest id) in one pass."""
    digest, largest = hashlib.sha256(), 0
    try:
        file = open_regular(path)
    except ValueError as error:
        raise UserError(f"{path} holds no token ids: {error}") from None
    with file:
        while not stop.is_set() and (chunk := file.read(READ_BYTES)):
            digest.update(chunk)
            ids = np.frombuffer(chunk, dtype, len(chunk) // dtype.itemsize)  # a file may be cut meanwhile
            largest = max(largest, largest_id(ids))
            progress(len(chunk))
    return digest.hexdigest(), largest
