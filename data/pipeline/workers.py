"""The processes that make units, side by side.

The trap: a worker outlives a parent that was killed, and would write beside its successor, so it watches the
parent.
"""

import multiprocessing
import os
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data.pipeline.hub import ON_DISK, Disk, Hub
from data.pipeline.token_files import DataError, open_tokenizer
from data.pipeline.units import Settings, Unit, tokenize

TELL_SECONDS = 0.2  # between a worker's reports

_worker = {}  # of a worker process: its tokenizer and the counters that it shares with the parent


@dataclass(frozen=True)
class Spent:
    """On one unit, after its files were there: by the clock that all processes share, and of one core."""

    process: int
    began: float
    ended: float
    cpu_seconds: float
    record: dict


def _start_worker(tokenizer_name: str, counters, store: Disk | Hub, fast: bool):
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = open_tokenizer(tokenizer_name)
    if fast:
        tokenizer.use_fast_encoder(verify=False)  # the parent has
    _worker.update(tokenizer=tokenizer, counters=counters, store=store)


def _die_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(unit: Unit, folder: Path, settings: Settings, max_bad: int):
    counters, untold, told_at = _worker["counters"], [0, 0, 0], 0.0

    def progress(*counts: int):
        nonlocal told_at
        for i, count in enumerate(counts):
            untold[i] += count
        if time.monotonic() > told_at + TELL_SECONDS:
            tell()

    def tell():
        nonlocal told_at
        with counters.get_lock():
            for i, count in enumerate(untold):
                counters[i] += count
        untold[:], told_at = [0, 0, 0], time.monotonic()

    paths = [path for path, _ in unit.files]
    _worker["store"].fetch(paths)
    began, cpu = time.monotonic(), time.process_time()
    record = tokenize(unit, folder, _worker["tokenizer"], settings, max_bad, progress)
    spent = Spent(os.getpid(), began, time.monotonic(), time.process_time() - cpu, record)
    tell()
    _worker["store"].release(paths)
    return spent


def run_units(
    units: list[Unit],
    folder: Path,
    tokenizer_name: str,
    settings: Settings,
    workers: int,
    max_bad: int,
    store: Disk | Hub = ON_DISK,
    fast: bool = False,
) -> list[Spent]:
    """Tokenize the units; those that cannot be are reported together, after the others are done."""
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 3)  # bytes read, documents, tokens
    size = sum(store.size(path) for unit in units for path, _ in unit.files)
    failed, spent = [], []
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_name, counters, store, fast))
    with pool, tqdm(total=size, unit="B", unit_scale=True, desc=f"{len(units)} units") as bar:
        waiting = {pool.submit(_work, unit, folder, settings, max_bad) for unit in units}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                _show(bar, counters)
                for future in done:
                    error = _error(future)
                    if error is None:
                        spent.append(future.result())
                    else:
                        failed.append(str(error))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        shown = "\n".join(failed)
        raise DataError(
            f"{len(failed)} of {len(units)} units could not be made; the others are kept\n{shown}"
        )
    return spent


def _error(future: Future) -> DataError | None:
    """What stops one unit; what stops them all is raised."""
    try:
        future.result()
    except DataError as error:
        return error
    except (BrokenProcessPool, MemoryError):
        raise DataError(
            "a worker process was killed, perhaps for memory; run the same command again with fewer --workers"
        ) from None
    except OSError as error:
        raise DataError(
            f"{error}; what was complete is kept: run the same command again when that is in order"
        ) from None
    return None


def _show(bar: tqdm, counters):
    read, documents, tokens = counters
    bar.set_postfix_str(f"{documents:,} documents, {tokens / 1e6:,.1f} M tokens", refresh=False)
    bar.update(read - bar.n)
