"""From raw text to a dataset of any size: with many processes, and safe to stop at any moment.

parts.py plans the parts of the input and makes one; this module makes all that have no manifest, and then
writes meta.json, last, from the manifests in their order. The trap: files that another plan left in the
folder look like those of this plan, so plan.json says which plan they belong to.
"""

import os
import re
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

from common.durable_file import write_bytes, write_json
from common.errors import UserError
from common.json_file import read_json
from data.pipeline import meta_file
from data.pipeline.bad_records import BAD_LISTED, too_many_bad
from data.pipeline.conversations import keep_template
from data.pipeline.folder_lock import only_preparation
from data.pipeline.hub import Hub
from data.pipeline.input_files import say_files
from data.pipeline.meta_file import count_tokens, describe, wrong_field
from data.pipeline.part_documents import hashes_of
from data.pipeline.parts import Part, Settings, plan_parts
from data.pipeline.splits import say_splits, threshold
from data.pipeline.token_files import LENGTHS, MASKED, SPLITS, described, is_count, is_of_split, stored_dtype
from data.pipeline.token_writer import give_names, write_files
from data.pipeline.verified import damaged_files, wrong_size
from data.pipeline.workers import Job, run_parts
from data.tokenizers.file_tokenizer import FileTokenizer, use_fastokens
from data.tokenizers.tokenizer import SubwordTokenizer, hash_tokenizer, keep_tokenizer

VERSION = 2  # of plan.json; what had none was made of units/, which were joined
LARGE_SHARE = 0.2  # of the tokens: a larger share for validation is a loss that few want
FAST_BYTES = 8 << 20  # input bytes from which on fastokens saves more time than it takes to open it
BYTES_PER_TOKEN = 4  # of text, about: prose has 4 to 5, source code and small vocabularies 2 to 3
TOKEN_FILE = re.compile(r"(train|val)(_\d{6})?(_\d{3})?\.bin(\.lengths)?")
TEMPORARY = re.compile(r"((train|val|plan|meta|tokenizer)\w*\.[\w.]+|\d{6}\.\w+)\.tmp\d*")


def prepare(
    files: list[Path], folder: Path, tokenizer: SubwordTokenizer, settings: Settings, source: str, job: Job
) -> dict:
    """Makes the dataset. Returns the content of meta.json."""
    parts, listing = plan_parts(files, settings, job.store, job.part_bytes)
    read = {file.path for part in parts for file in part.files}
    of_test = [path for path in files if os.path.abspath(path) not in read]
    say_files("left out", of_test, "the test split, by their names; --splits=ignore reads all files alike")
    plan = {"version": VERSION, **asdict(replace(settings, columns=None, chat=None))}
    for kind in (settings.columns, settings.chat and settings.chat._replace(folder="")):  # it may be another
        plan |= kind._asdict() if kind else {}
    plan |= {"input": listing, "tokenizer": hash_tokenizer(tokenizer)}
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        start_or_resume(folder, plan, job.resume)
        found = read_manifests(parts, folder, settings, tokenizer.vocab_size)
        missing = [part for part, manifest in zip(parts, found, strict=True) if manifest is None]
        remove_leftovers(folder, {name for each in found if each for name in each["files"]})
        if missing:
            (folder / "meta.json").unlink(missing_ok=True)  # a dataset that lost a file is incomplete
            settings = with_threshold(settings, parts, job.store)
            if not settings.columns:  # how many ids a shard of them holds is not known before it is read
                check_disk_space(missing, folder, stored_dtype(settings.dtype(tokenizer.vocab_size)).itemsize)
            is_much = not settings.with_lengths and sum(part.size for part in missing) > FAST_BYTES
            fast = is_much and use_fastokens(tokenizer)
            run_parts(missing, folder, tokenizer, settings, job, fast)
        return finish(parts, folder, tokenizer, settings, source, job)


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
    tokens = 0.0
    for part in parts:
        most = part.text_size if part.max_tokens is None else part.max_tokens
        tokens += min(part.text_size / BYTES_PER_TOKEN, most)
    needed, free = tokens * id_bytes / 1e9, shutil.disk_usage(folder).free / 1e9  # GB
    state = f"the token files will take about {needed:,.2f} GB; {folder} has {free:,.2f} GB free"
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


def delete_dataset(folder: Path) -> None:
    """Also one of an earlier version, which had units/."""
    patterns = ["meta.*", "plan.json", "parts/*", "units/*", *(f"{split}*.bin*" for split in SPLITS)]
    for leftover in chain.from_iterable(map(folder.glob, patterns)):
        leftover.unlink(missing_ok=True)


def start_or_resume(folder: Path, plan: dict, resume: bool) -> None:
    """Returns if all that is in the folder belongs to this plan. UserError if not, unless resume is False:
    then what is there is deleted."""
    path, parts = folder / "plan.json", folder / "parts"
    for inside in (parts, folder / "units"):
        if inside.is_symlink():
            raise UserError(f"{inside} is a link, through which nothing is written; remove it")
    if not resume:
        delete_dataset(folder)
    if path.is_file():
        try:
            old = read_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged ({error}); --no-resume deletes what is there") from None
        if differ := [key for key in plan | old if old.get(key) != plan.get(key)]:
            raise begun_otherwise(folder, ["version of this program"] if "version" in differ else differ)
    elif any(folder.glob("*.bin")):
        raise UserError(f"{folder} holds a dataset made otherwise; pass another --output or --no-resume")
    parts.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_json(path, plan)


def read_manifests(parts: list[Part], folder: Path, settings: Settings, vocab_size: int) -> list[dict | None]:
    """The parts' manifests; None for a part that has none, or whose token files are not what it says."""
    dtype = settings.dtype(vocab_size)
    manifests = [_read_manifest(part, folder, dtype, settings.counts) for part in parts]
    files = {name: file for manifest in manifests if manifest for name, file in manifest["files"].items()}
    damaged = {name.removesuffix(LENGTHS) for name in damaged_files(folder, described(dtype, files))}
    for name in sorted(damaged):
        print(f"{folder / name} is damaged; it is made again")
    return [m if m is not None and not damaged & m["files"].keys() else None for m in manifests]


def _read_manifest(part: Part, folder: Path, dtype: str, counts: tuple[str, ...]) -> dict | None:
    """The manifest, if its fields are possible and its token files are there and have the sizes it says."""
    try:
        manifest = read_json(part.manifest(folder))
    except (OSError, ValueError):
        return None
    possible: dict[str, Callable] = dict.fromkeys((*counts, "val_documents"), is_count)
    possible |= dict.fromkeys(("bad_records", "val_files"), meta_file.is_list_of_text)
    possible["files"] = lambda value: isinstance(value, dict)
    if wrong_field("", manifest, possible, possible):
        return None
    files, name = manifest["files"], re.compile(rf"({'|'.join(part.stems.values())})(_\d{{3}})?\.bin")
    for each, file in files.items():
        if not name.fullmatch(each) or meta_file.wrong_token_file(each, file, ("tokens", "sha256", "max_id")):
            return None
    return None if wrong_size(folder, described(dtype, files)) else manifest


def remove_leftovers(folder: Path, token_files: Set[str]) -> None:
    """Deletes what killed processes left: temporary files, and token files other than these."""
    for path in (*folder.glob("parts/*.tmp*"), *folder.iterdir()):
        other = TOKEN_FILE.fullmatch(path.name) and path.name.removesuffix(LENGTHS) not in token_files
        if other or TEMPORARY.fullmatch(path.name):
            path.unlink()


# --- the end ---


def finish(
    parts: list[Part], folder: Path, tokenizer: SubwordTokenizer, settings: Settings, source: str, job: Job
) -> dict:
    """Checks all parts together and writes tokenizer.json, meta.pkl and, last, meta.json."""
    found = read_manifests(parts, folder, settings, tokenizer.vocab_size)
    manifests = [manifest for manifest in found if manifest is not None]
    if len(manifests) < len(found):
        raise UserError(f"token files in {folder} were changed meanwhile; run the same command again")
    counts = {key: sum(manifest[key] for manifest in manifests) for key in settings.counts}
    bad = [line for manifest in manifests for line in manifest["bad_records"]]
    if counts["bad"] > job.max_bad:
        for part, manifest in zip(parts, manifests, strict=True):
            if manifest["bad"]:  # made again, as the record may be repaired meanwhile
                part.manifest(folder).unlink(missing_ok=True)
        raise too_many_bad(counts["bad"], bad, job.max_bad)
    named = {file.name: file.split for part in parts for file in part.files if file.split}
    hashes = {split: sorted(folder.glob(f"parts/*.{split}")) for split in SPLITS}
    say_splits([name for name, split in named.items() if split == "val"], manifests, hashes)
    files = {name: file for manifest in manifests for name, file in manifest["files"].items()}
    limit = "" if settings.max_tokens is None else f", more than --max_tokens={settings.max_tokens}"
    check_no_empty_split(folder, files, f"use more text{limit}, or another --val_fraction, with --no-resume")
    chat, kept = settings.chat, keep_tokenizer(folder, tokenizer)
    eot_id = chat.end_of_turn if chat else settings.eot_id
    meta = describe(tokenizer.vocab_size, kept, eot_id, source, dict(sorted(files.items()))) | counts
    if chat:
        keep_template(chat.folder, folder)
        meta |= {"dtype": MASKED, "chat": {"train_on": chat.train_on, "template": chat.template}}
    write_meta(folder, meta)
    if bad:
        print(f"left out {counts['bad']} bad records:\n    " + "\n    ".join(bad[:BAD_LISTED]))
    tokens = count_tokens(meta)
    share = tokens["val"] / sum(tokens.values())
    if settings.val_fraction <= LARGE_SHARE < share and not named:
        print(
            f"warning: {100 * share:.0f} % of the tokens are for validation, although --val_fraction="
            f"{settings.val_fraction:g}: it counts documents. Cut the long ones into several, or add text"
        )
    return meta


def check_no_empty_split(folder: Path, files: dict[str, dict], fix: str) -> None:
    for split in SPLITS:
        if not any(is_of_split(name, split) for name in files):
            raise UserError(f"the {split} split of {folder} would hold no tokens; {fix}")


def write_meta(folder: Path, meta: dict) -> dict:
    """Makes a folder of token files a dataset."""
    write_bytes(folder / "meta.pkl", meta_file.nanogpt_meta(meta["vocab_size"], meta["tokenizer"]))
    write_json(folder / "meta.json", meta)
    return meta


# --- a small dataset ---


def write_dataset(
    folder: str | Path, splits: Mapping, vocab_size: int, tokenizer: dict, eot_id: int | None, source: str
) -> dict:
    """Writes train.bin, val.bin, meta.json and meta.pkl in one pass; returns what meta.json holds.

    splits is {"train": chunks of ids, "val": chunks of ids}; few chunks are in memory at a time. tokenizer is
    the .meta of a tokenizer. eot_id is the id that ends each document in the files, None when documents are
    not marked. A dataset that is already there stays whole until the new tokens are complete on disk.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        if (folder / "plan.json").is_file():
            raise UserError(f"{folder} holds a dataset made otherwise; pass another --output, or empty it")
        documents = ((split, [ids]) for split, chunks in splits.items() for ids in chunks)
        try:
            files = write_files(folder, {split: split for split in SPLITS}, documents, vocab_size)
            check_no_empty_split(folder, files, "the input is too small to be split")
            # From here on, the folder holds files of two datasets, so the old meta.json is deleted first.
            (folder / "meta.json").unlink(missing_ok=True)
            give_names(folder, files)
        finally:
            for split in SPLITS:
                (folder / f"{split}.bin.tmp").unlink(missing_ok=True)
        if tokenizer["kind"] == "tokenizers":
            tokenizer = keep_tokenizer(folder, FileTokenizer(tokenizer["file"]))
        return write_meta(folder, describe(vocab_size, tokenizer, eot_id, source, files))
