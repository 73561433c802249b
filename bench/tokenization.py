"""Measures one way of making token ids: a tokenizer's library, data/pipeline/preparation.py or datasets.map.

Each encodes the same documents, on one core unless it says otherwise. The trap: a worker process takes
seconds to start and a tokenizer takes seconds to load, and a small sample would measure only that. So time is
counted inside the processes, from the first document on, and each unit of the preparation takes some seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.pipeline.document_pieces import PIECE_CHARS
from data.pipeline.documents import BadRecord, read_records
from data.pipeline.units import Settings, Unit
from data.pipeline.workers import run_units
from data.tokenizers.file_tokenizer import FileTokenizer
from data.tokenizers.tokenizer import find_eot, open_tokenizer

BATCH_DOCUMENTS = 1000  # datasets.map's default
UNITS_PER_WORKER = 2


@dataclass(frozen=True)
class Rate:
    """What one measurement found, over all its processes together."""

    tokens: int
    tokens_per_sec: float
    # tokens for each second of CPU time, in which waiting for other processes of the machine does not count
    cpu_tokens_per_sec: float
    mb_per_sec: float  # of text, in UTF-8


def read_sample(files: list[Path], megabytes: float) -> list[str]:
    """Documents from the beginning of the files, about the same number of bytes from each."""
    texts: list[str] = []
    bytes_per_file = megabytes * 1e6 / len(files)
    for path in files:
        size = 0
        for _, document in read_records(path):
            if isinstance(document, BadRecord):
                raise UserError(f"{document}; choose another --input")
            text = "".join(document)
            texts.append(text[: 2 * PIECE_CHARS])
            size += len(texts[-1].encode())
            if size >= bytes_per_file:
                break
    return texts


# --- our preparation ---


def measure_preparation(
    tokenizer_name: str, sample: Path, sample_bytes: int, passes: int, workers: int, fast: bool, folder: Path
) -> Rate:
    """Makes units that read the sample `passes` times each. A worker's rate is measured from the beginning
    of its first unit to the end of its last one."""
    tokenizer = open_tokenizer(tokenizer_name)
    settings = Settings(find_eot(tokenizer, None), None, 0.001, 1 << 28)
    files = ((str(sample), sample.name),) * passes
    units = [Unit(number, None, files, None) for number in range(UNITS_PER_WORKER * workers)]
    (folder / "units").mkdir(parents=True)
    with contextlib.redirect_stderr(io.StringIO()):  # the progress bar
        finished = run_units(units, folder, tokenizer_name, settings, workers, 0, fast=fast)
    if len({unit.process for unit in finished}) != workers:
        raise UserError("a worker process started so late that it had nothing to do; use a larger --mb")
    rate = seconds = 0.0
    tokens = 0
    for process in {unit.process for unit in finished}:
        own = [unit for unit in finished if unit.process == process]
        made = sum(file["tokens"] for unit in own for file in unit.manifest["files"].values())
        rate += made / (max(unit.ended for unit in own) - min(unit.began for unit in own))
        seconds += sum(unit.cpu_seconds for unit in own)
        tokens += made
    return Rate(tokens, rate, tokens / seconds, rate * sample_bytes * passes * len(units) / tokens / 1e6)


# --- the libraries, in a process of their own ---


class Peers:
    """The libraries, on one thread of a process that stays alive, so that each tokenizer is loaded once."""

    def __init__(self, texts: list[str]):
        self.pool = ProcessPoolExecutor(1, get_context("spawn"), _start, (texts,))

    def measure(self, method: str, tokenizer_name: str) -> Rate:
        return self.pool.submit(_measure, method, tokenizer_name).result()

    def close(self) -> None:
        self.pool.shutdown()


_process: dict[str, Any] = {}  # of the peers' process: its texts and tokenizers


def _start(texts: list[str]) -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1")
    _process.update(texts=texts, size=sum(len(text.encode()) for text in texts))


def _measure(method: str, tokenizer_name: str) -> Rate:
    encode = _process.get(tokenizer_name)
    if encode is None:
        encode = _process[tokenizer_name] = batch_call(tokenizer_name)
        encode(_process["texts"][:10])
    seconds, cpu, tokens = {"library": _library, "datasets.map": _datasets_map}[method](encode)
    return Rate(tokens, tokens / seconds, tokens / cpu, _process["size"] / seconds / 1e6)


def batch_call(tokenizer_name: str) -> Callable[[list[str]], list[list[int]]]:
    """The library's fastest call for a list of texts on one thread; it returns lists of ids."""
    tokenizer = open_tokenizer(tokenizer_name)
    if isinstance(tokenizer, FileTokenizer):
        library = tokenizer.tokenizer
        return lambda texts: [e.ids for e in library.encode_batch_fast(texts, add_special_tokens=False)]
    return lambda texts: tokenizer.encoding.encode_ordinary_batch(texts, num_threads=1)


def _library(encode: Callable[[list[str]], list[list[int]]]) -> tuple[float, float, int]:
    texts, tokens = _process["texts"], 0
    began, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(texts), BATCH_DOCUMENTS):
        tokens += sum(map(len, encode(texts[start : start + BATCH_DOCUMENTS])))
    return time.perf_counter() - began, time.process_time() - cpu, tokens


def _datasets_map(encode: Callable[[list[str]], list[list[int]]]) -> tuple[float, float, int]:
    """Measures it as training scripts use it: one process, batched, the ids written to an Arrow file."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        source = datasets.Dataset.from_dict({"text": _process["texts"]})
        began, cpu = time.perf_counter(), time.process_time()
        made = source.map(
            lambda batch: {"ids": encode(batch["text"])},
            batched=True,
            batch_size=BATCH_DOCUMENTS,
            remove_columns=["text"],
            cache_file_name=str(Path(folder) / "ids.arrow"),
            new_fingerprint="ids",  # otherwise the time to hash the tokenizer, for its cache, would count too
        )
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        tokens = sum(len(ids) for chunk in made.data.column("ids").chunks for ids in chunk)
    return seconds, cpu, tokens
