"""The worker processes that make parts, several at a time.

The trap: a worker outlives a parent that was killed, and would write the same files as the workers of the
next run. So each worker waits in a thread for the end of its parent, and then ends too.
"""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.errors import UserError
from data.pipeline.hub import Hub
from data.pipeline.part_writer import write_part
from data.pipeline.parts import Part, Settings
from data.tokenizers.file_tokenizer import use_fastokens
from data.tokenizers.tokenizer import Tokenizer, open_tokenizer

# of a worker process: its tokenizer, its job, and the counts of documents and tokens that all share
_worker: dict[str, Any] = {}


@dataclass(frozen=True)
class Job:
    """How the work is done. Apart from part_bytes, it changes no byte of the dataset."""

    workers: int = 1  # processes
    max_bad: int = 0  # records that may be left out as unreadable
    resume: bool = True  # False begins again
    store: Hub | None = None  # that the input files are downloaded from
    part_bytes: int | None = None  # of text in a part of several files; None: chosen by the input


def _start_worker(tokenizer_name: str, counts: Any, job: Job, fast: bool) -> None:
    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "called in a process that is no worker"
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    tokenizer = open_tokenizer(tokenizer_name)
    if fast:
        use_fastokens(tokenizer)
    _worker.update(tokenizer=tokenizer, counts=counts, job=job)


def _work(part: Part, folder: Path, settings: Settings) -> None:
    def count(documents: int, tokens: int) -> None:
        with counts.get_lock():
            counts[0] += documents
            counts[1] += tokens

    paths, job, counts = [file.path for file in part.files], _worker["job"], _worker["counts"]
    if job.store is not None:
        job.store.fetch(paths)
    write_part(part, folder, _worker["tokenizer"], settings, job.max_bad, count)
    if job.store is not None:
        job.store.release(paths)


def run_parts(
    parts: list[Part], folder: Path, tokenizer: Tokenizer, settings: Settings, job: Job, fast: bool = False
) -> None:
    """Makes the parts. One UserError reports all that failed, after the others are done."""
    context = multiprocessing.get_context("spawn")
    counts = context.Array("q", 2)  # documents and tokens that all workers have written
    failed: list[str] = []
    named = tokenizer.meta.get("file") or tokenizer.meta["name"]
    workers = min(job.workers, len(parts))
    pool = ProcessPoolExecutor(workers, context, _start_worker, (named, counts, job, fast))
    size = sum(part.size for part in parts)
    with pool, tqdm(total=size, unit="B", unit_scale=True, desc=f"{len(parts)} parts") as bar:
        try:
            # Ctrl-C in a terminal goes to all, and the parent ends the workers: they begin with it blocked
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            running = {pool.submit(_work, part, folder, settings): part.size for part in parts}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            waiting = set(running)
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                bar.set_postfix_str(f"{counts[0]:,} documents, {counts[1] / 1e6:,.1f} M tokens")
                for future in done:
                    bar.update(running[future])
                    try:
                        future.result()
                    except UserError as error:  # stops this part only
                        failed.append(str(error))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):  # a part may take minutes; none is half there
                for worker in multiprocessing.active_children():
                    worker.kill()
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, BrokenProcessPool | MemoryError):
                fix = "run the same command again with fewer --workers"
                raise UserError(f"a worker process was killed, perhaps for memory; {fix}") from None
            if isinstance(error, OSError):
                fix = "what was complete is kept: run the same command again when that is in order"
                raise UserError(f"{error}; {fix}") from None
            raise
    if failed:
        said = f"{len(failed)} of {len(parts)} parts could not be made; the others are kept"
        raise UserError("\n".join([said, *failed]))
