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
from data.pipeline.token_files import LENGTHS, largest_id, stored_dtype

MEMORY, LOCK = ".verified.json", ".verified.lock"
READ_BYTES = 1 << 24  # that each thread reads at a time
THREADS = 16  # files that are read at the same time; hashing releases the interpreter lock
REMEMBER_SECONDS = 10.0  # between the times at which results are stored while files are read
LARGE = 10**9  # bytes; reading more takes seconds, so a progress bar is shown

log = logging.getLogger("nanomfu")


def entry(path: Path, file: dict) -> dict:
    """What to remember of a file; while the stamp is the same, it need not be read again. file: one of
    described(). Call this before the file is read, so that a change meanwhile is noticed."""
    stat = path.stat()
    stamp = [stat.st_size, stat.st_mtime_ns, file["dtype"], file.get("sha256")]
    return {"stamp": stamp, "max_id": file.get("max_id")}


def recall(folder: Path) -> dict[str, dict]:
    """{name: {"stamp", "max_id"}} of the files that have been read; damaged entries are left out."""
    try:
        memory = read_json(folder / MEMORY).items()
    except (OSError, ValueError):
        return {}
    is_entry = lambda e: isinstance(e, dict) and type(e.get("max_id")) is int and "stamp" in e  # noqa: E731
    return {name: e for name, e in memory if is_entry(e)}


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


def forget(folder: Path, names: Set[str]) -> None:
    """The files with these names are read again before they are used."""
    if names & recall(folder).keys():
        remember(folder, dict.fromkeys(names, {}))


# Of the functions below, `files` are those of described().


def wrong_size(folder: Path, files: dict[str, dict]) -> str | None:
    """Which file is not there or has another size than meta.json says."""
    for name, file in files.items():
        path, size = folder / name, file["tokens"] * stored_dtype(file["dtype"]).itemsize
        if not path.is_file():
            return f"{path} is missing or not a regular file"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size:,} bytes, meta.json says {size:,}"
    return None


def remembered(folder: Path, files: dict[str, dict]) -> dict[str, int]:
    """{name: largest id} of the files that were read before and have not changed since."""
    known = recall(folder) if files else {}
    return {
        name: known[name]["max_id"]
        for name in known.keys() & files.keys()
        if known[name]["stamp"] == entry(folder / name, files[name])["stamp"]
    }


def read_files(
    folder: Path, files: dict[str, dict], names: Iterable[str]
) -> Iterator[tuple[str, str, int, bool]]:
    """(name, sha256, largest id, whether meta.json says the same) of these files, in the order in which they
    are finished. Good ones are remembered while others are read: after a stop, the next start goes on."""
    entries, good = {name: entry(folder / name, files[name]) for name in names}, {}
    if not entries:
        return
    stop, remembered_at = threading.Event(), time.monotonic()
    size = sum(each["stamp"][0] for each in entries.values())
    seconds = 0.5 if sys.stderr.isatty() else 30  # between lines of progress
    options = {"unit": "B", "unit_scale": True, "mininterval": seconds, "disable": size < LARGE}
    threads = min(THREADS, usable_cores())
    with tqdm(total=size, desc="Reading", **options) as bar, ThreadPoolExecutor(threads) as pool:
        task = lambda name: (folder / name, files[name]["dtype"], bar.update, stop)  # noqa: E731
        reading = {pool.submit(scan, *task(name)): name for name in entries}
        try:
            for done in as_completed(reading):
                name, (sha256, max_id) = reading[done], done.result()
                said = {"sha256": sha256, "max_id": max_id} | files[name]
                same = (sha256, max_id) == (said["sha256"], said["max_id"])
                if same:
                    good[name] = entries[name] | {"max_id": max_id}
                yield name, sha256, max_id, same
                if good and time.monotonic() - remembered_at > REMEMBER_SECONDS:
                    remember(folder, good)
                    remembered_at = time.monotonic()
        finally:  # the first bad file, or Ctrl-C, ends the others
            stop.set()
            pool.shutdown(cancel_futures=True)
            if good:
                remember(folder, good)


def damaged_files(
    folder: Path, files: dict[str, dict], again: bool = False, vocab_size: int | None = None
) -> set[str]:
    """The names of the files that are not what meta.json says of them. A file is read unless it is
    remembered; with `again`, in any case. UserError for ids outside of the vocabulary."""
    known, damaged = {} if again else remembered(folder, files), set()
    for name, _, max_id, same in read_files(folder, files, files.keys() - known.keys()):
        if not same:
            damaged.add(name)
        elif vocab_size is not None and max_id >= vocab_size and not name.endswith(LENGTHS):
            raise UserError(
                f"{folder / name} contains token id {max_id:,}, but meta.json says vocab_size {vocab_size:,}"
            )
    return damaged


@contextlib.contextmanager
def one_reader(folder: Path) -> Iterator[None]:
    """Waits until no other process reads the files of this folder, on other machines with the same disk, too;
    what it has found need not be read again. If the folder cannot be locked, several read at a time."""
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            opened.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.warning("Waiting for another process, which reads the token files in %s", folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def scan(path: Path, dtype: str, progress: Callable[[int], object], stop: threading.Event) -> tuple[str, int]:
    """(sha256, largest id) in one pass."""
    digest, largest, stored = hashlib.sha256(), 0, stored_dtype(dtype)
    try:
        file = open_regular(path)
    except ValueError as error:
        raise UserError(f"{path} holds no token ids: {error}") from None
    with file:
        while not stop.is_set() and (chunk := file.read(READ_BYTES)):
            digest.update(chunk)
            ids = np.frombuffer(chunk, stored, len(chunk) // stored.itemsize)  # a file may be cut meanwhile
            largest = max(largest, largest_id(ids))
            progress(len(chunk))
    return digest.hexdigest(), largest
