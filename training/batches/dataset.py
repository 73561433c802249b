"""Opens datasets and checks them. Every mismatch between tokens, meta.json and model is found here, on the
CPU, before the first step: on the GPU it would be an illegal memory access or, worse, a wrong loss.

data/NAME/ holds meta.json and, for each split, SPLIT.bin or shards SPLIT_*.bin: flat token ids, read as one
sequence. Every start checks the names, the sizes and the largest ids that meta.json records. It checks the
hash of a file that has not been read whole before (data/pipeline/verified.py). The ids of a token window are
checked when it is read (training/batches/token_files.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat as stat_module
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.json_file import open_regular
from data.folders import dataset_folder, how_to_make
from data.pipeline.meta_file import read_meta
from data.pipeline.token_files import (
    LENGTHS,
    MASKED,
    described,
    looks_wider,
    stored_dtype,
    token_file_names,
)
from data.pipeline.verified import LARGE, one_reader, read_files, remembered, wrong_size
from training.batches.token_files import TokenFiles
from training.configuration.keys import TrainConfig

log = logging.getLogger("nanomfu")

# The first bytes of other kinds of files. Read as token ids, such a file would pass for text.
OTHER_FILES = {
    b"\x93NUMPY": "a NumPy array (.npy)",
    b"PK\x03\x04": "a zip archive (.npz, .pt)",
    b"\x28\xb5\x2f\xfd": "compressed by zstandard",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"PAR1": "a parquet file",
    b"\x88\xd8\x34\x01": "a token file with a header (llm.c), whose first 1,024 bytes are no tokens",
}


def needs_validation(config: TrainConfig) -> bool:
    return bool(config.eval_interval) or config.eval_only or config.eval_at_start


def open_dataset(config: TrainConfig, scan: bool) -> tuple[dict[str, TokenFiles], dict]:
    """The checked splits ('train', and 'val' if the run evaluates) and meta.json's content. Raises UserError.

    With scan, every file that has not been read whole before is read for its largest id and its hash, unless
    verify_data is 'size'. The results are stored in the dataset's folder. One rank of each machine scans.
    """
    folder = dataset_folder(config.dataset)
    try:
        return _open(folder, config, scan)
    except OSError as error:  # no permission, a broken disk, a name that is too long
        raise UserError(f"dataset={config.dataset!r:.200} cannot be read: {error}") from None


def _open(folder: Path, config: TrainConfig, scan: bool) -> tuple[dict[str, TokenFiles], dict]:
    if not folder.is_dir():
        raise UserError(f"dataset={config.dataset!r}: there is no folder {folder}; {how_to_make(folder)}")
    meta = read_meta(folder)
    splits: dict[str, TokenFiles] = {}
    stats: dict[Path, os.stat_result] = {}
    for split in ("train", "val") if needs_validation(config) else ("train",):
        paths = [folder / name for name in token_file_names(folder, split)]
        if not paths:
            raise UserError(f"no token file {folder}/{split}.bin; {how_to_make(folder)}")
        _check_names(paths, split, meta, folder)
        stats |= {path: _stat(path) for path in paths}
        splits[split] = _check_size({path: stats[path] for path in paths}, split, meta, config)
    files = {path.name: meta["files"].get(path.name, {}) for path in stats}
    # that lengths add up to the tokens is seen where they are used (training/batches/document_starts.py)
    listed = described(meta["dtype"], files)
    if wrong := wrong_size(folder, {name: listed[name] for name in listed.keys() - files.keys()}):
        raise UserError(f"{wrong}; {how_to_make(folder)}")
    _check_no_overlap(splits, stats)
    model_vocab = config.model_config().vocab_size
    _check_vocabulary(meta, config)
    for name, recorded in meta["files"].items():
        _check_id(folder / name, recorded.get("max_id", 0), model_vocab)
    if scan:
        with one_reader(folder) if config.verify_data == "hash" else contextlib.nullcontext():
            _check_content(folder, listed, config)
    return splits, meta


def check_targets(meta: dict, config: TrainConfig) -> None:
    """Of conversations, a token may be no target, and none is divided (data/pipeline/conversations.py). May
    raise UserError."""
    if meta["dtype"] != MASKED:
        return
    if config.packing != "truncate" or not config.doc_masking:
        raise UserError(
            f"dataset={config.dataset!r} holds conversations, of which only some tokens are targets; set "
            f"--packing=truncate --doc_masking=True (got {config.packing!r}, {config.doc_masking})"
        )
    longest = max(file["lengths"]["longest"] for file in meta["files"].values())
    if longest > config.block_size + 1:
        raise UserError(
            f"dataset={config.dataset!r} has a conversation of {longest:,} tokens, which block_size="
            f"{config.block_size} would cut inside; set --block_size={longest - 1}, or prepare it again with "
            f"--max_length={config.block_size + 1}"
        )


def _stat(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise UserError(f"{path} is a link to a file that is not there; {how_to_make(path.parent)}") from None
    if not stat_module.S_ISREG(found.st_mode):
        raise UserError(f"{path} is not a regular file; {how_to_make(path.parent)}")
    return found


def _check_names(paths: list[Path], split: str, meta: dict, folder: Path) -> None:
    """The shards found must be those that meta.json lists: one more or less makes another sequence."""
    listed = {name for name in meta["files"] if name.startswith(f"{split}_")}
    found = {path.name for path in paths}
    if listed and listed != found:
        name = min(listed ^ found)
        state = "is missing from" if name in listed else "is not listed in the meta.json of"
        raise UserError(f"{name} {state} {folder}, which was not copied whole; {how_to_make(folder)}")


def _check_no_overlap(splits: dict[str, TokenFiles], stats: dict[Path, os.stat_result]) -> None:
    """Refuses a validation file that is a link to a training file. training/batches/sources.py compares
    hashes, also between datasets."""
    training = {(stats[path].st_dev, stats[path].st_ino): path for path in splits["train"].paths}
    for path in splits["val"].paths if "val" in splits else []:
        twin = training.get((stats[path].st_dev, stats[path].st_ino))
        if twin:
            raise overlap_error(path, twin)


def overlap_error(validation: Path, training: Path) -> UserError:
    return UserError(
        f"{validation} is the same file as {training}: the validation loss would be of text that was trained "
        "on; prepare the dataset again from text that is not there twice, or set --eval_interval=0"
    )


def _check_size(stats: dict[Path, os.stat_result], split: str, meta: dict, config: TrainConfig) -> TokenFiles:
    dtype = stored_dtype(meta["dtype"])
    for path, stat in stats.items():
        size = stat.st_size
        if not size:
            raise UserError(f"{path} is empty; {how_to_make(path.parent)}")
        if size % dtype.itemsize:
            raise UserError(
                f"{path} has {size} bytes, not a multiple of {dtype.itemsize} ({meta['dtype']}): "
                "it is truncated, or meta.json names another dtype"
            )
        recorded = meta["files"].get(path.name, {}).get("tokens")
        if recorded is not None and recorded != size // dtype.itemsize:
            raise UserError(
                f"{path} holds {size // dtype.itemsize:,} tokens, but meta.json records {recorded:,}; "
                f"{how_to_make(path.parent)}"
            )
        if "sha256" not in meta["files"].get(path.name, {}):
            _check_is_tokens(path, dtype)
    sizes = [stat.st_size for stat in stats.values()]
    files = TokenFiles(list(stats), sizes, dtype, config.model_config().vocab_size)
    if files.total < config.block_size + 1:
        raise UserError(
            f"the {split} split in {files.paths[0].parent} has {files.total:,} tokens, fewer than one window "
            f"of block_size + 1 = {config.block_size + 1:,}; use a smaller --block_size or more text"
        )
    return files


def _check_is_tokens(path: Path, dtype: np.dtype) -> None:
    """Checks a file whose hash meta.json does not record. Raises UserError."""
    try:
        with open_regular(path) as file:
            begin = file.read(1 << 17)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    for magic, kind in OTHER_FILES.items():
        if begin.startswith(magic):
            raise UserError(
                f"{path} is {kind}, not flat token ids; data/text/prepare.py makes them from text"
            )
    if looks_wider(np.frombuffer(begin, dtype, len(begin) // dtype.itemsize)):
        raise UserError(
            f"every second number in {path} is 0 or very small if ids are {dtype.name}, so they have more "
            "bits; meta.json must say uint32, and ids of 64 bits must be written again as uint32"
        )


def _check_vocabulary(meta: dict, config: TrainConfig) -> None:
    """A tokenizer may have more ids than the model, such as one for padding, if no text was encoded to them:
    meta.json then records the largest id of every file."""
    model_vocab = config.model_config().vocab_size
    unknown = not meta["files"] or any("max_id" not in file for file in meta["files"].values())
    if meta["vocab_size"] > model_vocab and unknown:
        name = (meta["tokenizer"] or {}).get("name", "its tokenizer")
        larger = "" if config.init_weights else f", or set --vocab_size={meta['vocab_size']}"
        raise UserError(
            f"dataset={config.dataset!r} has a vocabulary of {meta['vocab_size']:,} ({name}), but the "
            f"model's vocab_size={model_vocab:,}; use a dataset made with the model's tokenizer{larger}"
        )


def _check_id(path: Path, largest: int, model_vocab: int) -> None:
    if largest >= model_vocab:
        raise UserError(
            f"{path} contains token id {largest:,}, beyond the model's vocab_size={model_vocab:,}; use a "
            "dataset made with the model's tokenizer, or a larger vocab_size"
        )


def _check_content(folder: Path, files: dict[str, dict], config: TrainConfig) -> None:
    """Checks the largest id and the hash of every file. A file read whole before is not read again."""

    def check(name: str, largest: int) -> None:
        if not name.endswith(LENGTHS):
            _check_id(folder / name, largest, config.model_config().vocab_size)

    known = remembered(folder, files)
    for each in known.items():
        check(*each)
    unread = [name for name in files if name not in known]
    size = sum((folder / name).stat().st_size for name in unread)
    if config.verify_data == "size":
        if unread:
            log.warning(
                "%d of %d token files in %s (%.1f GB) have not been read whole; verify_data='size' trusts "
                "them. python -m data.inspect %s --hash reads them",
                *(len(unread), len(files), folder, size / 1e9, config.dataset),
            )
        unread = []
    elif size > LARGE:
        log.warning(
            "Reading %d token files in %s once, %.0f GB, to check hashes and ids. Stopped, it goes on from "
            "there; --verify_data=size would start at once and trust names, sizes and recorded ids",
            *(len(unread), folder, size / 1e9),
        )
    for name, sha256, largest, _ in read_files(folder, files, unread):
        recorded = files[name].get("sha256", sha256)
        if recorded != sha256:
            raise UserError(
                f"{folder / name} is not the file that meta.json describes (sha256 {sha256[:12]}..., "
                f"recorded {recorded[:12]}...); {how_to_make(folder)}"
            )
        check(name, largest)
