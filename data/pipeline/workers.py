"""The worker processes that make units, several at a time.

The trap: a worker outlives a parent that was killed, and would write the same files as the workers of the
next run. So each worker waits in a thread for the end of its parent, and then ends too.
"""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError
from data.pipeline.hub import ON_DISK, Disk, Hub
from data.pipeline.units import Settings, Unit, tokenize
from data.tokenizers.file_tokenizer import use_fastokens
from data.tokenizers.tokenizer import open_tokenizer

# of a worker process: its tokenizer, its store, and the count of tokens that all share
_worker: dict[str, Any] = {}


def _start_worker(tokenizer_name: str, tokens: Synchronized, store: Disk | Hub, fast: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = open_tokenizer(tokenizer_name)
    if fast:
        use_fastokens(tokenizer)
    _worker.update(tokenizer=tokenizer, tokens=tokens, store=store)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process that is no worker"
    parent.join()
    os._exit(1)


def _count(tokens: int) -> None:
    with _worker["tokens"].get_lock():
        _worker["tokens"].value += tokens


def _work(unit: Unit, folder: Path, settings: Settings, max_bad: int) -> None:
    paths = [path for path, _ in unit.files]
    _worker["store"].fetch(paths)
    tokenize(unit, folder, _worker["tokenizer"], settings, max_bad, _count)
    _worker["store"].release(paths)


def run_units(
    units: list[Unit],
    folder: Path,
    tokenizer_name: str,
    settings: Settings,
    workers: int,
    max_bad: int,
    store: Disk | Hub = ON_DISK,
    fast: bool = False,
) -> None:
    """Tokenize the units. One UserError reports all units that failed, after the others are done."""
    context = multiprocessing.get_context("spawn")
    tokens = context.Value("q", 0)  # that all workers have written
    size = sum(unit.size(store.size) for unit in units)
    failed: list[str] = []
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_name, tokens, store, fast))
    with pool, tqdm(total=size, unit="B", unit_scale=True, desc=f"{len(units)} units") as bar:
        try:
            # Ctrl-C in a terminal goes to all, and the parent ends the workers: they begin with it blocked
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            sizes = {pool.submit(_work, u, folder, settings, max_bad): u.size(store.size) for u in units}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            waiting = set(sizes)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                bar.set_postfix_str(f"{tokens.value / 1e6:,.1f} M tokens")
                for future in done:
                    bar.update(sizes[future])
                    if (error := _error(future)) is not None:
                        failed.append(str(error))
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():  # a unit may take minutes; none is half there
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        shown = "\n".join(failed)
        raise UserError(
            f"{len(failed)} of {len(units)} units could not be made; the others are kept\n{shown}"
        )


def _error(future: Future) -> UserError | None:
    """The error that stops this unit only. An error that stops all units is raised."""
    try:
        future.result()
    except UserError as error:
        return error
    except (BrokenProcessPool, MemoryError):
        raise UserError(
            "a worker process was killed, perhaps for memory; run the same command again with fewer --workers"
        ) from None
    except OSError as error:
        raise UserError(
            f"{error}; what was complete is kept: run the same command again when that is in order"
        ) from None
    return None
