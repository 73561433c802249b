"""From raw text to a dataset of any size: many processes, many machines, and safe to stop at any moment.

The input files, sorted, are grouped into units; units.py makes each one's token files. This module plans the
units, runs them, and when the record of every unit is there writes meta.json, last, from the
records in order. The plan depends on the names and sizes of the files only, so machine k of n takes the units
k, k + n, ... The trap: a worker outlives a parent that was killed, and would write beside its successor, so
it watches the parent.
"""

import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from data.tokens import (
    SPLITS,
    DataError,
    count_tokens,
    describe,
    nanogpt_meta,
    open_tokenizer,
    sync,
    tokenizer_json,
)
from data.units import Settings, Unit, tokenize, write_json

UNIT_BYTES = 256 << 20  # of input at most; a killed run does that much again in each worker
UNITS = 256  # of a small input, so that many workers can share it


# --- the plan ---


def split_of(name: str) -> str | None:
    """The split that a file's folder or its own name states: train/, validation-00000-of-00001.parquet."""
    *folders, file = Path(name).parts
    for split in ("train", "validation", "test"):
        if split in folders or file.startswith((f"{split}-", f"{split}.", f"{split}_")):
            return split
    return None


def plan_units(files: list[Path], max_tokens: int | None, unit_bytes: int | None) -> tuple[list[Unit], str]:
    """The units, and a hash of the names and sizes that they were made from.

    If some files are a validation split, they become val, and those of a test split are left out; otherwise
    each document falls to train or val by a coin. max_tokens is shared over the units by their size.
    """
    root = Path(os.path.commonpath([path.resolve().parent for path in files]))
    named = [(path, path.resolve().relative_to(root).as_posix()) for path in files]
    listing = [(name, path.stat().st_size) for path, name in named]
    unit_bytes = unit_bytes or min(UNIT_BYTES, sum(size for _, size in listing) // UNITS)
    stated = {name: split_of(name) for _, name in named}
    has_validation = {"train", "validation"} <= set(stated.values())
    groups, group, size = [], [], 0
    for (path, name), (_, file_size) in zip(named, listing, strict=True):
        split = {"validation": "val", "test": None}.get(stated[name], "train") if has_validation else "both"
        if split is None:
            continue
        if group and (size + file_size > unit_bytes or split != groups[-1][0]):
            group = []
        if not group:
            groups.append((split, group := [], []))
            size = 0
        group.append((str(path), name))
        groups[-1][2].append(file_size)
        size += file_size
    total = sum(sum(sizes) for *_, sizes in groups)
    units = []
    for number, (split, group, sizes) in enumerate(groups):
        share = None if max_tokens is None else max(1, -(-max_tokens * sum(sizes) // max(1, total)))
        units.append(Unit(number, None if split == "both" else split, tuple(group), share))
    return units, hashlib.sha256(json.dumps(listing).encode()).hexdigest()


# --- the processes ---

_worker = {}  # of a worker process: its tokenizer and the counters that it shares with the parent


def _start_worker(tokenizer_name: str, counters):
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.update(tokenizer=open_tokenizer(tokenizer_name), counters=counters)


def _die_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _work(unit: Unit, folder: Path, settings: Settings, max_bad: int):
    counters = _worker["counters"]

    def progress(*counts: int):
        with counters.get_lock():
            for i, count in enumerate(counts):
                counters[i] += count

    tokenize(unit, folder, _worker["tokenizer"], settings, max_bad, progress)


def run_units(
    units: list[Unit], folder: Path, tokenizer_name: str, settings: Settings, workers: int, max_bad: int
):
    """Tokenize the units; those that cannot be are reported together, after the others are done."""
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 3)  # bytes read, documents, tokens
    size = sum(os.path.getsize(path) for unit in units for path, _ in unit.files)
    failed = []
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer_name, counters))
    with pool, tqdm(total=size, unit="B", unit_scale=True, desc=f"{len(units)} units") as bar:
        waiting = {pool.submit(_work, unit, folder, settings, max_bad) for unit in units}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                _show(bar, counters)
                failed += [str(error) for error in map(_error, done) if error is not None]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        shown = "\n".join(failed)
        raise DataError(
            f"{len(failed)} of {len(units)} units could not be made; the others are kept\n{shown}"
        )


def _error(future: Future) -> DataError | None:
    """What stops one unit; what stops them all is raised."""
    try:
        future.result()
    except DataError as error:
        return error
    except BrokenProcessPool:
        raise DataError(
            "a worker process was killed, perhaps for memory; run the same command again with fewer --workers"
        ) from None
    except OSError as error:
        raise DataError(
            f"{error}; what was complete is kept: run the same command again when the disk is in order"
        ) from None
    return None


def _show(bar: tqdm, counters):
    read, documents, tokens = counters
    bar.set_postfix_str(f"{documents:,} documents, {tokens / 1e6:,.1f} M tokens", refresh=False)
    bar.update(read - bar.n)


# --- the dataset ---


def read_record(unit: Unit, folder: Path, itemsize: int) -> dict | None:
    """The unit's record, if its files are there with the sizes that it states."""
    try:
        record = json.loads(unit.record_path(folder).read_text(encoding="utf-8"))
        for name, file in record["files"].items():
            if (folder / name).stat().st_size != file["tokens"] * itemsize:
                return None
        return record
    except (OSError, ValueError, KeyError):
        return None


def start_or_resume(folder: Path, plan: dict, resume: bool):
    """Leave in the folder nothing but work of this plan."""
    path = folder / "plan.json"
    if not resume:
        old = [*folder.glob("meta.*"), path, *folder.glob("units/*")]
        for leftover in [*old, *(file for split in SPLITS for file in folder.glob(f"{split}*.bin*"))]:
            leftover.unlink(missing_ok=True)
    if path.is_file():
        old = json.loads(path.read_text(encoding="utf-8"))
        differ = [key for key in plan if old.get(key) != plan[key]]
        if differ:
            raise DataError(
                f"{folder} was begun with another {', '.join(differ)}; pass what it was begun with, another "
                f"--output, or --no-resume to delete what is there"
            )
    elif any(folder.glob("*.bin")):
        raise DataError(f"{folder} holds a dataset made otherwise; pass another --output or --no-resume")
    (folder / "units").mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_json(path, plan)


def assemble(folder: Path, records: list[dict], tokenizer, eot_id: int, source: str) -> dict:
    """Write tokenizer.json, meta.pkl and, last, meta.json."""
    meta_tokenizer = dict(tokenizer.meta)
    if meta_tokenizer["kind"] == "tokenizers":
        content = tokenizer_json(meta_tokenizer["file"]).encode()
        _replace(folder / "tokenizer.json", content)
        meta_tokenizer["file"] = "tokenizer.json"
    meta_tokenizer["sha256"] = hash_tokenizer(tokenizer)
    files = {name: file for record in records for name, file in record["files"].items()}
    files = {name: files[name] for name in sorted(files)}
    meta = describe(tokenizer.vocab_size, meta_tokenizer, eot_id, source, files)
    for split, tokens in count_tokens(meta).items():
        if tokens == 0:
            raise DataError(
                f"the {split} split of {folder} would hold no tokens; use more text or another --val_fraction"
            )
    for key in ("documents", "empty", "bad"):
        meta[key] = sum(record[key] for record in records)
    _replace(folder / "meta.pkl", nanogpt_meta(tokenizer.vocab_size, meta_tokenizer))
    write_json(folder / "meta.json", meta)
    return meta


def _replace(path: Path, content: bytes):
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_bytes(content)
    sync(temporary)
    os.replace(temporary, path)


def hash_tokenizer(tokenizer) -> str:
    """Of the tokenizer.json, or of tiktoken's ranks."""
    if tokenizer.meta["kind"] == "tokenizers":
        return hashlib.sha256(tokenizer_json(tokenizer.meta["file"]).encode()).hexdigest()
    vocabulary = tokenizer.encoding.token_byte_values()
    return hashlib.sha256(b"".join(len(token).to_bytes(4, "big") + token for token in vocabulary)).hexdigest()


def prepare(
    files: list[Path],
    folder: Path,
    tokenizer,
    settings: Settings,
    source: str,
    workers: int = 1,
    max_tokens: int | None = None,
    max_bad: int = 0,
    resume: bool = True,
    part: int = 0,
    num_parts: int = 1,
    unit_bytes: int | None = None,
) -> dict | None:
    """Make this machine's part of the dataset; meta.json's content if that completes it, else None."""
    units, listing = plan_units(files, max_tokens, unit_bytes)
    plan = {
        **asdict(settings),
        "input": listing,
        "tokenizer": hash_tokenizer(tokenizer),
        "max_tokens": max_tokens,
        "unit_bytes": unit_bytes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".part-{part}-of-{num_parts}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"another process is at work on part {part} of {folder}") from None
        start_or_resume(folder, plan, resume)
        itemsize = 2 if tokenizer.vocab_size <= 65536 else 4
        missing = [
            unit
            for unit in units
            if unit.number % num_parts == part and read_record(unit, folder, itemsize) is None
        ]
        if missing:
            (folder / "meta.json").unlink(missing_ok=True)  # a dataset that lost a file is complete no more
            name = tokenizer.meta.get("file") or tokenizer.meta["name"]
            run_units(missing, folder, name, settings, min(workers, len(missing)), max_bad)
        records = [read_record(unit, folder, itemsize) for unit in units]
        if None in records:
            print(f"part {part} is complete; {records.count(None)} units of other parts are not here yet")
            return None
        bad = [line for record in records for line in record["bad_records"]]
        total = sum(record["bad"] for record in records)
        if total > max_bad:
            shown = "\n    ".join(bad[:20])
            raise DataError(
                f"{total} bad records in all, more than --max_bad={max_bad}; look at them, and run the same "
                f"command with a larger one to leave them out:\n    {shown}"
            )
        meta = assemble(folder, records, tokenizer, settings.eot_id, source)
    if total:
        print(f"left out {total} bad records:\n    " + "\n    ".join(bad[:20]))
    return meta
