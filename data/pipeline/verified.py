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
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.cgroups import usable_cores
from common.durable_file import write_bytes
from common.errors import UserError
from common.json_file import open_regular, read_json
from data.pipeline.document_lengths import LENGTH_BYTES, LENGTH_DTYPE, lengths_files, lengths_name
from data.pipeline.token_files import stored_dtype

MEMORY, LOCK = ".verified.json", ".verified.lock"
READ_BYTES = 1 << 24  # that each thread reads at a time
THREADS = 16  # files that are read at the same time; hashing releases the interpreter lock
LARGE = 10**9  # bytes; reading more takes seconds, so a progress bar is shown

log = logging.getLogger("nanomfu")


def stamp(stat: os.stat_result, dtype: str, sha256: str | None) -> list:
    """What must be the same as when the file was read. dtype and sha256 are what meta.json says."""
    return [stat.st_size, stat.st_mtime_ns, dtype, sha256]


def entry(path: Path, dtype: str, written: dict) -> dict:
    """What to remember of a file. written: what meta.json says of it. Call this before the file is read, so
    that a change of the file during the reading makes the entry invalid."""
    return {"stamp": stamp(path.stat(), dtype, written.get("sha256")), "max_id": written.get("max_id")}


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
    entries = {name: entry(folder / name, dtype, file) for name, file in files.items()}
    lengths = lengths_files(files).items()
    remember(folder, entries | {name: entry(folder / name, LENGTH_DTYPE, file) for name, file in lengths})


def forget(folder: Path, names: Set[str]) -> None:
    """The files with these names are read again before they are used."""
    if names & recall(folder).keys():
        remember(folder, {name: {"stamp": ["damaged"], "max_id": 0} for name in names})


def wrong_size(folder: Path, dtype: str, files: dict[str, dict]) -> str | None:
    """Which token file, or file of lengths, is not there or has another size than meta.json says."""
    itemsize = stored_dtype(dtype).itemsize
    sizes = {name: file["tokens"] * itemsize for name, file in files.items()}
    listed = {lengths_name(name): file["lengths"] for name, file in files.items() if "lengths" in file}
    sizes |= {name: lengths["documents"] * LENGTH_BYTES for name, lengths in listed.items()}
    for path, size in ((folder / name, size) for name, size in sizes.items()):
        if not path.is_file():
            return f"{path} is missing or not a regular file"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size:,} bytes, meta.json says {size:,}"
    return None


def damaged_files(
    folder: Path, dtype: str, files: dict[str, dict], again: bool = False, vocab_size: int | None = None
) -> set[str]:
    """The names of the files that are not what meta.json says of them: {name: what it says}, and of the files
    of lengths beside them. A file is read unless it was read before and has not changed since; with `again`,
    in any case. UserError for ids outside of the vocabulary."""
    known = {} if again else recall(folder)
    entries = {name: entry(folder / name, dtype, written) for name, written in files.items()}
    unread = [name for name in files if known.get(name, {}).get("stamp") != entries[name]["stamp"]]
    damaged = set()
    for path, sha256, max_id in read_whole([folder / name for name in unread], stored_dtype(dtype)):
        written = files[path.name]
        if (sha256, max_id) != (written.get("sha256", sha256), written.get("max_id", max_id)):
            damaged.add(path.name)
        elif vocab_size is not None and max_id >= vocab_size:
            raise UserError(
                f"{path} contains token id {max_id:,}, but meta.json says vocab_size {vocab_size:,}"
            )
        entries[path.name]["max_id"] = max_id
    if good := {name: entries[name] for name in unread if name not in damaged}:
        remember(folder, good)
    lengths = lengths_files(files)
    return damaged | damaged_files(folder, LENGTH_DTYPE, lengths, again) if lengths else damaged


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
            largest = max(largest, int(ids.max(initial=0)))
            progress(len(chunk))
    return digest.hexdigest(), largest
