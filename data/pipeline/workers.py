"""The worker processes that make parts, several at a time.

The trap: a worker outlives a parent that was killed, and would write the same files as the workers of the
next run. So each worker waits in a thread for the end of its parent, and then ends too.
"""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError
from data.pipeline.hub import Hub
from data.pipeline.part_writer import write_part
from data.pipeline.parts import Part, Settings
from data.tokenizers.file_tokenizer import use_fastokens
from data.tokenizers.tokenizer import open_tokenizer

# of a worker process: its tokenizer, its store, and the counts of documents and tokens that all share
_worker: dict[str, Any] = {}


def _start_worker(tokenizer_name: str, counts: Any, store: Hub | None, fast: bool) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = open_tokenizer(tokenizer_name)
    if fast:
        use_fastokens(tokenizer)
    _worker.update(tokenizer=tokenizer, counts=counts, store=store)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "called in a process that is no worker"
    parent.join()
    os._exit(1)


def _count(documents: int, tokens: int) -> None:
    counts = _worker["counts"]
    with counts.get_lock():
        counts[0] += documents
        counts[1] += tokens


def _work(part: Part, folder: Path, settings: Settings, max_bad: int) -> None:
    paths, hub = [file.path for file in part.files], _worker["store"]
    if hub is not None:
        hub.fetch(paths)
    write_part(part, folder, _worker["tokenizer"], settings, max_bad, _count)
    if hub is not None:
        hub.release(paths)


def run_parts(
    parts: list[Part],
    folder: Path,
    tokenizer_name: str,
    settings: Settings,
    workers: int,
    max_bad: int,
    store: Hub | None = None,
    fast: bool = False,
) -> None:
    """Makes the parts. One UserError reports all that failed, after the others are done."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 2)  # documents and tokens that all workers have written
    failed: list[str] = []
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_name, counts, store, fast))
    size = sum(part.size for part in parts)
    with pool, tqdm(total=size, unit="B", unit_scale=True, desc=f"{len(parts)} parts") as bar:
        try:
            # Ctrl-C in a terminal goes to all, and the parent ends the workers: they begin with it blocked
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            running = {pool.submit(_work, part, folder, settings, max_bad): part.size for part in parts}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            waiting = set(running)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                bar.set_postfix_str(f"{counts[0]:,} documents, {counts[1] / 1e6:,.1f} M tokens")
                for future in done:
                    bar.update(running[future])
                    if (error := _error(future)) is not None:
                        failed.append(str(error))
        except KeyboardInterrupt:
            for worker in multiprocessing.active_children():  # a part may take minutes; none is half there
                worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        shown = "\n".join(failed)
        raise UserError(
            f"{len(failed)} of {len(parts)} parts could not be made; the others are kept\n{shown}"
        )


def _error(future: Future) -> UserError | None:
    """The error that stops this part only. An error that stops all parts is raised."""
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
