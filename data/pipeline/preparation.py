"""From raw text to a dataset of any size: with many processes, and safe to stop at any moment.

The sorted input files are grouped into units, and units.py makes the token files of each unit. This module
plans the units and runs them. When the manifest of every unit is there, it writes meta.json, last, from the
manifests in their order. The plan depends only on the names and sizes of the input files. The trap: files
that another plan left in the folder look like those of this plan, so plan.json says which plan they belong
to.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.durable_file import write_bytes, write_json
from common.errors import UserError
from common.json_file import read_json
from data.pipeline.bad_records import BAD_LISTED, too_many_bad
from data.pipeline.disk_space import check_disk_space
from data.pipeline.empty_split import fill_empty_split
from data.pipeline.folder_lock import only_preparation
from data.pipeline.hub import ON_DISK, Disk, Hub
from data.pipeline.input_files import say_files
from data.pipeline.manifests import COUNTS, read_manifests
from data.pipeline.meta_file import count_tokens, describe, nanogpt_meta
from data.pipeline.single_files import join, read_joined
from data.pipeline.splits import say_splits, splits_of_files, threshold
from data.pipeline.token_files import SPLITS, smallest_dtype, stored_dtype
from data.pipeline.units import Settings, Unit
from data.pipeline.workers import run_units
from data.tokenizers.file_tokenizer import use_fastokens
from data.tokenizers.tokenizer import SubwordTokenizer, hash_tokenizer, keep_tokenizer

UNIT_BYTES = 256 << 20  # most input bytes of a unit; after a kill, each worker repeats at most so much
UNITS = 256  # about so many for a small input, so that many workers can share it
PART_BYTES = 32 << 20  # at least so many has a part of a file: seconds of work
LARGE_SHARE = 0.2  # of the tokens: a larger share for validation is a loss that few want
FAST_BYTES = 8 << 20  # input bytes from which on fastokens saves more time than it takes to open it


# --- the plan ---


@dataclass
class _Group:
    """The input files of one unit while they are collected."""

    split: str | None
    span: tuple[int, int] | None  # of the only file, if it is divided
    files: list[tuple[str, str]] = field(default_factory=list)
    size: int = 0  # bytes


def _spans(path: Path, size: int, most: int) -> list[tuple[int, int] | None]:
    """(first byte, byte after the last) of the parts of a file, none of which is larger than `most`; [None]
    if it is not divided: a compressed file can be read only from its beginning."""
    if size <= most or path.suffix not in (".jsonl", ".parquet"):
        return [None]
    count = -(-size // most)
    return [(size * k // count, size * (k + 1) // count) for k in range(count)]


def plan_units(
    files: list[Path],
    settings: Settings,
    max_tokens: int | None = None,
    unit_bytes: int | None = None,
    store: Disk | Hub = ON_DISK,
) -> tuple[list[Unit], str]:
    """The units, and a hash of what decides them: names and sizes of the input files, and their parts.

    data/pipeline/splits.py says the split of a file. max_tokens is divided among the units by their size,
    without a remainder; the dataset has fewer tokens only if the text of a unit has fewer tokens than the
    unit's part of max_tokens. Downloads are not divided: each unit fetches and deletes its own files.
    """
    # abspath does not follow links: in the hub's cache, the file that a link points to has another name
    absolute = [Path(os.path.abspath(path)) for path in files]
    root = Path(os.path.commonpath([path.parent for path in absolute]))
    named = [(path, path.relative_to(root).as_posix()) for path in absolute]
    sizes = [store.size(path) for path in absolute]
    unit_bytes = unit_bytes or min(UNIT_BYTES, sum(sizes) // UNITS)
    divides = not isinstance(store, Hub)
    splits = splits_of_files([name for _, name in named], settings)
    listing: list[tuple] = []
    groups: list[_Group] = []
    for (path, name), split, size in zip(named, splits, sizes, strict=True):
        spans = _spans(path, size, max(unit_bytes, PART_BYTES)) if divides else [None]
        listing.append((name, size, len(spans)) if len(spans) > 1 else (name, size))
        for span in spans if split != "test" else []:
            here = span[1] - span[0] if span else size
            together = groups and (groups[-1].split, groups[-1].span) == (split, span)
            if not together or groups[-1].size + here > unit_bytes:
                groups.append(_Group(split, span))
            groups[-1].files.append((str(path), name))
            groups[-1].size += here
    total = sum(group.size for group in groups)
    units, end = [], 0
    for number, group in enumerate(groups):
        begin, end = end, end + group.size
        unit_tokens = None
        if max_tokens is not None:
            unit_tokens = max_tokens * end // max(1, total) - max_tokens * begin // max(1, total)
        units.append(Unit(number, group.split, tuple(group.files), unit_tokens, group.span))
    return units, hashlib.sha256(json.dumps(listing).encode()).hexdigest()


# --- the dataset ---


def with_threshold(settings: Settings, units: list[Unit], store: Disk | Hub = ON_DISK) -> Settings:
    """The settings, and the hash below which a document is for validation. It is not looked for in files that
    say their split, or are not on this disk yet."""
    if any(unit.split for unit in units) or isinstance(store, Hub):
        return settings
    return replace(settings, val_below=threshold(units, settings))


def begun_otherwise(folder: Path, differ: list[str]) -> UserError:
    return UserError(
        f"{folder} was begun with another {', '.join(differ)}; pass what it was begun with, another "
        "--output, or --no-resume to delete what is there. With a meta.json, it is complete and trains as is"
    )


def _refuse_link(folder: Path) -> None:
    if (folder / "units").is_symlink():
        raise UserError(f"{folder / 'units'} is a link, through which nothing is written; remove it")


def delete_dataset(folder: Path) -> None:
    _refuse_link(folder)
    leftovers = [*folder.glob("meta.*"), folder / "plan.json", *folder.glob("units/*")]
    leftovers += [file for split in SPLITS for file in folder.glob(f"{split}*.bin*")]
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)


def start_or_resume(folder: Path, plan: dict, resume: bool) -> None:
    """Returns if all that is in the folder belongs to this plan. UserError if not, unless resume is False:
    then what is there is deleted."""
    path = folder / "plan.json"
    _refuse_link(folder)
    if not resume:
        delete_dataset(folder)
    if path.is_file():
        try:
            old = read_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); --no-resume deletes what is there") from None
        differ = [key for key in plan | old if old.get(key) != plan.get(key)]
        if differ:
            raise begun_otherwise(folder, differ)
    elif any(folder.glob("*.bin")):
        raise UserError(f"{folder} holds a dataset made otherwise; pass another --output or --no-resume")
    (folder / "units").mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_json(path, plan)


def assemble(
    folder: Path,
    manifests: list[dict],
    tokenizer: SubwordTokenizer,
    eot_id: int | None,
    source: str,
) -> dict:
    """Write tokenizer.json, meta.pkl and, last, meta.json."""
    meta_tokenizer = keep_tokenizer(folder, tokenizer)
    files = {name: file for manifest in manifests for name, file in manifest["files"].items()}
    files = {name: files[name] for name in sorted(files)}
    meta = describe(tokenizer.vocab_size, meta_tokenizer, eot_id, source, files)
    for split, tokens in count_tokens(meta).items():
        if tokens == 0:
            raise UserError(
                f"the {split} split of {folder} would hold no tokens; use more text or another --val_fraction"
            )
    for key in COUNTS:
        meta[key] = sum(manifest[key] for manifest in manifests)
    write_bytes(folder / "meta.pkl", nanogpt_meta(tokenizer.vocab_size, meta_tokenizer))
    write_json(folder / "meta.json", meta)
    return meta


def finish(
    units: list[Unit],
    folder: Path,
    tokenizer: SubwordTokenizer,
    settings: Settings,
    source: str,
    max_bad: int,
) -> dict:
    """Check all units together and make a dataset of them."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    joined = read_joined(folder, dtype)
    found = [joined] if joined else read_manifests(units, folder, dtype)
    manifests = [manifest for manifest in found if manifest is not None]
    if len(manifests) < len(found):
        raise UserError(f"token files in {folder} were changed meanwhile; run the same command again")
    bad = [line for manifest in manifests for line in manifest["bad_records"]]
    total = sum(manifest["bad"] for manifest in manifests)
    if total > max_bad:
        for unit, manifest in zip(units, manifests, strict=False):
            if manifest["bad"]:  # made again, as the record may be repaired meanwhile
                unit.manifest_path(folder).unlink(missing_ok=True)
        raise too_many_bad(total, bad, max_bad)
    if not joined:
        if not settings.tokens:
            manifests = fill_empty_split(units, manifests, folder, settings, tokenizer.vocab_size)
        say_splits(units, manifests, folder)
        joined = join(manifests, folder, settings.shard_tokens, tokenizer.vocab_size)
        manifests = [joined] if joined else manifests
    meta = assemble(folder, manifests, tokenizer, settings.eot_id, source)
    if total:
        print(f"left out {total} bad records:\n    " + "\n    ".join(bad[:BAD_LISTED]))
    tokens = count_tokens(meta)
    share = tokens["val"] / sum(tokens.values())
    if settings.val_fraction <= LARGE_SHARE < share and not any(unit.split for unit in units):
        print(
            f"warning: {100 * share:.0f} % of the tokens are for validation, although --val_fraction="
            f"{settings.val_fraction:g}: it counts documents. Cut the long ones into several, or add text"
        )
    return meta


@dataclass(frozen=True)
class Job:
    """How the work is done. It changes no byte of the dataset."""

    workers: int = 1  # processes
    max_bad: int = 0  # records that may be left out as unreadable
    resume: bool = True  # False begins again


def prepare(
    files: list[Path],
    folder: Path,
    tokenizer: SubwordTokenizer,
    settings: Settings,
    source: str,
    job: Job,
    max_tokens: int | None = None,
    unit_bytes: int | None = None,
    store: Disk | Hub = ON_DISK,
) -> dict:
    """Makes the dataset. Returns the content of meta.json."""
    units, listing = plan_units(files, settings, max_tokens, unit_bytes, store)
    read = {path for unit in units for path, _ in unit.files}
    of_test = [path for path in files if os.path.abspath(path) not in read]
    say_files("left out", of_test, "the test split, by their names; --splits=ignore reads all files alike")
    whole = {path for path in read if path.endswith((".gz", ".zst")) and store.size(path) > UNIT_BYTES}
    say_files("not divided", whole, "compressed: one worker reads each, and begins it again after a kill")
    settings = with_threshold(settings, units, store)
    plan = {
        **settings.to_dict(),
        "input": listing,
        "tokenizer": hash_tokenizer(tokenizer),
        "max_tokens": max_tokens,
        "unit_bytes": unit_bytes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        dtype = smallest_dtype(tokenizer.vocab_size)
        start_or_resume(folder, plan, job.resume)
        found = [] if read_joined(folder, dtype) else read_manifests(units, folder, dtype)
        missing = [unit for unit, manifest in zip(units, found, strict=False) if manifest is None]
        if missing:
            (folder / "meta.json").unlink(missing_ok=True)  # a dataset that lost a file is incomplete
            if not settings.tokens:  # how many ids a shard of them holds is not known before it is read
                check_disk_space(missing, folder, stored_dtype(dtype).itemsize, store.size)
            size = sum(unit.size(store.size) for unit in missing)
            needed = size if max_tokens is None else min(size, 4 * max_tokens)
            fast = not settings.tokens and needed > FAST_BYTES and use_fastokens(tokenizer)
            name = tokenizer.meta.get("file") or tokenizer.meta["name"]
            workers = min(job.workers, len(missing))
            run_units(missing, folder, name, settings, workers, job.max_bad, store, fast)
        return finish(units, folder, tokenizer, settings, source, job.max_bad)
