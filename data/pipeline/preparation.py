"""From raw text to a dataset of any size: with many processes, and safe to stop at any moment.

parts.py plans the parts of the input and makes one; this module makes all that have no manifest, and then
writes meta.json, last, from the manifests in their order. The trap: files that another plan left in the
folder look like those of this plan, so plan.json says which plan they belong to.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from common.durable_file import create, write_bytes, write_json
from common.errors import UserError
from common.json_file import read_json
from data.pipeline.bad_records import BAD_LISTED, too_many_bad
from data.pipeline.conversations import keep_template
from data.pipeline.folder_lock import only_preparation
from data.pipeline.hub import Hub
from data.pipeline.input_files import say_files
from data.pipeline.meta_file import count_tokens, describe, nanogpt_meta, wrong_token_file
from data.pipeline.part_documents import hashes_of
from data.pipeline.parts import (
    PART_BYTES,
    Part,
    Settings,
    plan_parts,
    text_size,
)
from data.pipeline.splits import say_splits, threshold
from data.pipeline.token_files import LENGTHS, MASKED, SPLITS, is_count, stored_dtype
from data.pipeline.token_writer import give_names, write_files
from data.pipeline.verified import damaged_files, wrong_size
from data.pipeline.workers import run_parts
from data.tokenizers.file_tokenizer import use_fastokens
from data.tokenizers.json_file import tokenizer_json
from data.tokenizers.tokenizer import SubwordTokenizer, hash_tokenizer, keep_tokenizer

VERSION = 2  # of plan.json; what had none was made of units/, which were joined
LONG_BYTES = 8 * PART_BYTES  # of text in a file that cannot be divided: worth a line
LARGE_SHARE = 0.2  # of the tokens: a larger share for validation is a loss that few want
FAST_BYTES = 8 << 20  # input bytes from which on fastokens saves more time than it takes to open it
BYTES_PER_TOKEN = 4  # of text, about: prose has 4 to 5, source code and small vocabularies 2 to 3
GB = 1e9
TOKEN_FILE = re.compile(
    r"(?:train|val)(?:_(\d{6}))?(?:_\d{3})?\.bin(?:\.lengths)?"
)  # and the number of its part
TEMPORARY = re.compile(r"(?:(?:train|val|plan|meta|tokenizer)\w*\.[\w.]+|\d{6}\.\w+)\.tmp\d*")


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
    store: Hub | None = None,
    part_bytes: int | None = None,
) -> dict:
    """Makes the dataset. Returns the content of meta.json."""
    parts, listing = plan_parts(files, settings, store, part_bytes)
    read = {file.path: file.size for part in parts for file in part.files}
    of_test = [path for path in files if os.path.abspath(path) not in read]
    say_files("left out", of_test, "the test split, by their names; --splits=ignore reads all files alike")
    packed = [path for path in read if path.endswith((".gz", ".zst"))]
    whole = [path for path in packed if text_size(path, read[path]) > LONG_BYTES]
    say_files("not divided", whole, "compressed: one worker reads each, and begins it again after a kill")
    plan = {"version": VERSION, **asdict(replace(settings, columns=None, chat=None))}
    for kind in (settings.columns, settings.chat and settings.chat._replace(folder="")):  # it may be another
        plan |= kind._asdict() if kind else {}
    plan |= {"input": listing, "tokenizer": hash_tokenizer(tokenizer)}
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        start_or_resume(folder, plan, job.resume)
        found = read_manifests(parts, folder, settings, tokenizer.vocab_size)
        missing = [part for part, manifest in zip(parts, found, strict=True) if manifest is None]
        remove_leftovers(folder, missing)
        if missing:
            (folder / "meta.json").unlink(missing_ok=True)  # a dataset that lost a file is incomplete
            settings = with_threshold(settings, parts, store)
            if not settings.columns:  # how many ids a shard of them holds is not known before it is read
                check_disk_space(missing, folder, stored_dtype(settings.dtype(tokenizer.vocab_size)).itemsize)
            fast = not settings.with_lengths and _needed(missing, settings) > FAST_BYTES
            fast = fast and use_fastokens(tokenizer)
            name = tokenizer.meta.get("file") or tokenizer.meta["name"]
            workers = min(job.workers, len(missing))
            run_parts(missing, folder, name, settings, workers, job.max_bad, store, fast)
        return finish(parts, folder, tokenizer, settings, source, job.max_bad)


def _needed(parts: list[Part], settings: Settings) -> int:
    """About how many bytes of input are read."""
    size = sum(part.size for part in parts)
    return size if settings.max_tokens is None else min(size, BYTES_PER_TOKEN * settings.max_tokens)


def with_threshold(settings: Settings, parts: list[Part], store: Hub | None = None) -> Settings:
    """The settings, and the hash below which a document is for validation. It is not looked for in files that
    say their split, or are not on this disk yet."""
    if any(file.split for part in parts for file in part.files) or store is not None:
        return settings
    below = threshold(hashes_of(parts, settings), settings.val_fraction, can_cut=not settings.with_lengths)
    return replace(settings, val_below=below, cut=below is None)


def check_disk_space(parts: list[Part], folder: Path, id_bytes: int) -> None:
    """Warns if the token files of these parts may not fit; UserError if they cannot. The sizes of the input
    files tell it within a factor of two or three; nothing is read."""
    free, tokens = shutil.disk_usage(folder).free, 0.0
    for part in parts:
        most = part.text_size if part.max_tokens is None else part.max_tokens
        tokens += min(part.text_size / BYTES_PER_TOKEN, most)
    needed = tokens * id_bytes
    state = (
        f"the token files will take about {needed / GB:,.2f} GB and the disk of {folder} has "
        f"{free / GB:,.2f} GB free"
    )
    fix = "make room, or use another --output or --max_tokens"
    if needed > 3 * free:
        raise UserError(f"{state}; {fix}")
    if needed > free / 2:
        print(f"warning: {state}. If it fills, what is complete is kept: {fix}")


# --- what is there already ---


def begun_otherwise(folder: Path, differ: list[str]) -> UserError:
    return UserError(
        f"{folder} was begun with another {', '.join(differ)}; pass what it was begun with, another "
        "--output, or --no-resume to delete what is there. With a meta.json, it is complete and trains as is"
    )


def _refuse_links(folder: Path) -> None:
    for inside in (folder / "parts", folder / "units"):
        if inside.is_symlink():
            raise UserError(f"{inside} is a link, through which nothing is written; remove it")


def delete_dataset(folder: Path) -> None:
    """Also one of an earlier version, which had units/."""
    _refuse_links(folder)
    patterns = ["meta.*", "plan.json", "parts/*", "units/*", *(f"{split}*.bin*" for split in SPLITS)]
    for leftover in chain.from_iterable(map(folder.glob, patterns)):
        leftover.unlink(missing_ok=True)


def start_or_resume(folder: Path, plan: dict, resume: bool) -> None:
    """Returns if all that is in the folder belongs to this plan. UserError if not, unless resume is False:
    then what is there is deleted."""
    path = folder / "plan.json"
    _refuse_links(folder)
    if not resume:
        delete_dataset(folder)
    if path.is_file():
        try:
            old = read_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); --no-resume deletes what is there") from None
        differ = [key for key in plan | old if old.get(key) != plan.get(key)]
        if differ:
            raise begun_otherwise(folder, ["version of this program"] if "version" in differ else differ)
    elif any(folder.glob("*.bin")):
        raise UserError(f"{folder} holds a dataset made otherwise; pass another --output or --no-resume")
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_json(path, plan)


def read_manifests(parts: list[Part], folder: Path, settings: Settings, vocab_size: int) -> list[dict | None]:
    """The parts' manifests; None for a part that has none, or whose token files are not what it says."""
    dtype = settings.dtype(vocab_size)
    manifests = [_read_manifest(part, folder, dtype, settings.counts) for part in parts]
    files = {name: file for manifest in manifests if manifest for name, file in manifest["files"].items()}
    damaged = {name.removesuffix(LENGTHS) for name in damaged_files(folder, dtype, files)}
    for name in sorted(damaged):
        print(f"{folder / name} is damaged; it is made again")
    return [m if m is not None and not damaged & m["files"].keys() else None for m in manifests]


def _read_manifest(part: Part, folder: Path, dtype: str, counts: tuple[str, ...]) -> dict | None:
    """The manifest, if its fields are possible and its token files are there and have the sizes it says."""
    try:
        manifest = read_json(part.manifest(folder))
    except (OSError, ValueError):
        return None
    files: Any = manifest.get("files")
    texts: list[Any] = [manifest.get("bad_records"), manifest.get("val_files")]
    name = re.compile(rf"({'|'.join(part.stems.values())})(_\d{{3}})?\.bin")
    is_possible = (
        isinstance(files, dict)
        and all(name.fullmatch(each) and not wrong_token_file(each, files[each]) for each in files)
        and all(None not in map(file.get, ("tokens", "sha256", "max_id")) for file in files.values())
        and all(isinstance(lines, list) for lines in texts)
        and all(isinstance(line, str) for lines in texts for line in lines)
        and all(is_count(manifest.get(key)) for key in (*counts, "val_documents"))
    )
    return manifest if is_possible and not wrong_size(folder, dtype, files) else None


def remove_leftovers(folder: Path, missing: list[Part]) -> None:
    """Deletes what killed processes left: temporary files, and token files of parts that are to be made."""
    numbers = {None if part.alone else f"{part.number:06d}" for part in missing}
    for path in (*folder.glob("parts/*.tmp*"), *folder.iterdir()):
        token_file = TOKEN_FILE.fullmatch(path.name)
        if TEMPORARY.fullmatch(path.name) or token_file and {None, token_file[1]} & numbers:
            path.unlink()


# --- the end ---


def finish(
    parts: list[Part],
    folder: Path,
    tokenizer: SubwordTokenizer,
    settings: Settings,
    source: str,
    max_bad: int,
) -> dict:
    """Checks all parts together and writes tokenizer.json, meta.pkl and, last, meta.json."""
    found = read_manifests(parts, folder, settings, tokenizer.vocab_size)
    manifests = [manifest for manifest in found if manifest is not None]
    if len(manifests) < len(found):
        raise UserError(f"token files in {folder} were changed meanwhile; run the same command again")
    counts = {key: sum(manifest[key] for manifest in manifests) for key in settings.counts}
    bad = [line for manifest in manifests for line in manifest["bad_records"]]
    if counts["bad"] > max_bad:
        for part, manifest in zip(parts, manifests, strict=True):
            if manifest["bad"]:  # made again, as the record may be repaired meanwhile
                part.manifest(folder).unlink(missing_ok=True)
        raise too_many_bad(counts["bad"], bad, max_bad)
    named = {file.name: file.split for part in parts for file in part.files if file.split}
    hashes = {split: sorted(folder.glob(f"parts/*.{split}")) for split in SPLITS}
    say_splits([name for name, split in named.items() if split == "val"], manifests, hashes)
    files = {name: file for manifest in manifests for name, file in manifest["files"].items()}
    kept, vocab_size = keep_tokenizer(folder, tokenizer), tokenizer.vocab_size
    chat = settings.chat
    eot_id = chat.end_of_turn if chat else settings.eot_id
    meta = describe(vocab_size, kept, eot_id, source, dict(sorted(files.items()))) | counts
    if chat:
        keep_template(chat.folder, folder)
        meta |= {"dtype": MASKED, "chat": {"train_on": chat.train_on, "template": chat.template}}
    tokens = count_tokens(meta)
    if empty := [split for split in SPLITS if not tokens[split]]:
        limit = "" if settings.max_tokens is None else f", more than --max_tokens={settings.max_tokens}"
        raise UserError(
            f"the {empty[0]} split of {folder} would hold no tokens; use more text{limit}, or another "
            "--val_fraction, with --no-resume"
        )
    write_bytes(folder / "meta.pkl", nanogpt_meta(vocab_size, kept))
    write_json(folder / "meta.json", meta)
    if bad:
        print(f"left out {counts['bad']} bad records:\n    " + "\n    ".join(bad[:BAD_LISTED]))
    share = tokens["val"] / sum(tokens.values())
    if settings.val_fraction <= LARGE_SHARE < share and not named:
        print(
            f"warning: {100 * share:.0f} % of the tokens are for validation, although --val_fraction="
            f"{settings.val_fraction:g}: it counts documents. Cut the long ones into several, or add text"
        )
    return meta


# --- a small dataset ---


def write_dataset(
    folder: str | Path,
    splits: Mapping[str, Iterable[np.ndarray | list[int]]],
    vocab_size: int,
    tokenizer: dict,
    eot_id: int | None,
    source: str,
) -> dict:
    """Writes train.bin, val.bin, meta.json and meta.pkl in one pass, all or nothing; returns what meta.json
    holds.

    splits is {"train": chunks of ids, "val": chunks of ids}; few chunks are in memory at a time. tokenizer is
    the .meta of a tokenizer. eot_id is the id that ends each document in the files, None when documents are
    not marked. A dataset that is already there stays whole until the new one is complete on disk.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        if (folder / "plan.json").is_file():
            raise UserError(f"{folder} holds a dataset made otherwise; pass another --output, or empty it")
        documents = ((split, [ids]) for split, chunks in splits.items() for ids in chunks)
        others: dict[str, bytes] = {}
        try:
            files = write_files(folder, {split: split for split in SPLITS}, documents, vocab_size)
            for split in SPLITS:
                if f"{split}.bin" not in files:
                    raise UserError(
                        f"{split}.bin of {folder} would hold no tokens; the input is too small to be split"
                    )
            others = {"meta.pkl": nanogpt_meta(vocab_size, tokenizer)}
            if tokenizer["kind"] == "tokenizers":
                others["tokenizer.json"] = content = tokenizer_json(tokenizer["file"]).encode()
                sha256 = hashlib.sha256(content).hexdigest()
                tokenizer = {**tokenizer, "file": "tokenizer.json", "sha256": sha256}
            meta = describe(vocab_size, tokenizer, eot_id, source, files)
            others["meta.json"] = (json.dumps(meta, indent=2) + "\n").encode()  # last
            for name, content in others.items():
                with create(folder / f"{name}.tmp") as file:
                    file.write(content)
            # From here on, the folder holds files of two datasets, so the old meta.json is deleted first.
            (folder / "meta.json").unlink(missing_ok=True)
            give_names(folder, [*files, *others])
        finally:
            for name in (*(f"{split}.bin" for split in SPLITS), *others):
                (folder / f"{name}.tmp").unlink(missing_ok=True)
        return meta
