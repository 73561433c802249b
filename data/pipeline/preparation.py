"""From raw text to a dataset of any size: many processes, many machines, and safe to stop at any moment.

The input files, sorted, are grouped into units; units.py makes each one's token files. This module plans the
units, runs them, and when the record of every unit is there writes meta.json, last, from the records in
order. The plan depends on the names and sizes of the files only, so machine k of n takes the units k, k + n,
... The trap: what another plan left in the folder looks like this one's, so plan.json says whose it is.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from data.pipeline.disk_space import check_room
from data.pipeline.empty_split import fill_empty_split
from data.pipeline.hub import ON_DISK, Disk, Hub
from data.pipeline.token_files import (
    SPLITS,
    DataError,
    count_tokens,
    describe,
    nanogpt_meta,
    sync,
    tokenizer_json,
)
from data.pipeline.units import Settings, Unit, write_json
from data.pipeline.workers import run_units

UNIT_BYTES = 256 << 20  # of input at most; a killed run does that much again in each worker
UNITS = 256  # of a small input, so that many workers can share it
FAST_BYTES = 8 << 20  # of input, from where verifying the fast encoder takes less time than it saves


# --- the plan ---


def split_of(name: str) -> str | None:
    """The split that a file's folder or its own name states: train/, validation-00000-of-00001.parquet."""
    *folders, file = Path(name).parts
    for split in ("train", "validation", "test"):
        if split in folders or file.startswith((f"{split}-", f"{split}.", f"{split}_")):
            return split
    return None


def plan_units(
    files: list[Path],
    max_tokens: int | None,
    unit_bytes: int | None,
    size_of: Callable[[Path], int] = os.path.getsize,
) -> tuple[list[Unit], str]:
    """The units, and a hash of the names and sizes that they were made from.

    If some files are a validation split, they become val, and those of a test split are left out; otherwise
    each document falls to train or val by a coin. max_tokens is shared over the units by their size, to the
    token; a unit whose text is shorter than its share is all that makes the dataset smaller.
    """
    absolute = [Path(os.path.abspath(path)) for path in files]  # links stay: the hub's cache is made of them
    root = Path(os.path.commonpath([path.parent for path in absolute]))
    named = [(path, path.relative_to(root).as_posix()) for path in absolute]
    listing = [(name, size_of(path)) for path, name in named]
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
    units, before = [], 0
    for number, (split, group, sizes) in enumerate(groups):
        first, before = before, before + sum(sizes)
        share = None
        if max_tokens is not None:
            share = max_tokens * before // max(1, total) - max_tokens * first // max(1, total)
        units.append(Unit(number, None if split == "both" else split, tuple(group), share))
    return units, hashlib.sha256(json.dumps(listing).encode()).hexdigest()


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


def finish(
    units: list[Unit], folder: Path, tokenizer, settings: Settings, source: str, max_bad: int
) -> dict | None:
    """Check the units together and make a dataset of them; None while some are not here."""
    itemsize = 2 if tokenizer.vocab_size <= 65536 else 4
    records = [read_record(unit, folder, itemsize) for unit in units]
    if None in records:
        (folder / "meta.json").unlink(missing_ok=True)
        print(f"{records.count(None)} of {len(units)} units are not here yet")
        return None
    bad = [line for record in records for line in record["bad_records"]]
    total = sum(record["bad"] for record in records)
    if total > max_bad:
        shown = "\n    ".join(bad[:20])
        raise DataError(
            f"{total} bad records in all, more than --max_bad={max_bad}; look at them, and run the same "
            f"command with a larger one to leave them out:\n    {shown}"
        )
    records = fill_empty_split(units, records, folder, settings, tokenizer.vocab_size)
    meta = assemble(folder, records, tokenizer, settings.eot_id, source)
    if total:
        print(f"left out {total} bad records:\n    " + "\n    ".join(bad[:20]))
    return meta


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
    store: Disk | Hub = ON_DISK,
) -> dict | None:
    """Make this machine's part of the dataset; meta.json's content if that completes it, else None.

    workers=0 makes nothing: it checks the input and writes the plan.
    """
    units, listing = plan_units(files, max_tokens, unit_bytes, store.size)
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
        if missing and workers:
            check_room(missing, folder, tokenizer, itemsize, store.size)
            size = sum(store.size(path) for unit in missing for path, _ in unit.files)
            needed = size if max_tokens is None else min(size, 4 * max_tokens)
            fast = needed > FAST_BYTES and tokenizer.use_fast_encoder()
            name = tokenizer.meta.get("file") or tokenizer.meta["name"]
            run_units(missing, folder, name, settings, min(workers, len(missing)), max_bad, store, fast)
        with open(folder / ".part-finish.lock", "w") as finishing:
            fcntl.flock(finishing, fcntl.LOCK_EX)  # parts that end together finish one after another
            return finish(units, folder, tokenizer, settings, source, max_bad)
