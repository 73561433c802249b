"""Opens datasets and checks them. Every mismatch between tokens, meta.json and model is found here, on the
CPU, before the first step: on the GPU it would be an illegal memory access or, worse, a wrong loss.

data/NAME/ holds meta.json and, for each split, SPLIT.bin or shards SPLIT_*.bin: flat token ids, read as one
sequence. Every start checks the names, the sizes and the largest ids that meta.json records. It checks the
hash of a file that has not been read whole before (data/pipeline/verified.py). The ids of a token window are
checked when it is read (training/batches/token_files.py).
"""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import numpy as np

from common.errors import UserError
from data.pipeline.verified import LARGE, read_whole, recall, remember, stamp
from training.batches.meta_file import check_is_tokens, check_meta
from training.batches.token_files import TokenFiles
from training.configuration.dataset_name import dataset_folder
from training.configuration.keys import ROOT, TrainConfig

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
REMEMBER_SECONDS = 10.0  # results are stored this often while reading: after a stop, the next start continues

log = logging.getLogger("nanomfu")


def needs_validation(config: TrainConfig) -> bool:
    return bool(config.eval_interval) or config.eval_only or config.eval_at_start


def open_dataset(config: TrainConfig, scan: bool) -> tuple[dict[str, TokenFiles], dict]:
    """The checked splits ('train', and 'val' if the run evaluates) and meta.json's content. Raises UserError.

    With scan, every file that has not been read whole before is read for its largest id and its hash, unless
    verify_data is 'size'. The results are stored in the dataset's folder. One rank of each machine scans.
    """
    folder = dataset_folder(config)
    meta = _read_meta(folder, config)
    splits: dict[str, TokenFiles] = {}
    stats: dict[Path, os.stat_result] = {}
    for split in ("train", "val") if needs_validation(config) else ("train",):
        paths = [folder / name for name in _file_names(folder, split)]
        if not paths:
            raise UserError(f"no token file {folder}/{split}.bin; {_how_to_make(folder)}")
        _check_names(paths, split, meta, folder)
        stats |= {path: path.stat() for path in paths}
        splits[split] = _check_size({path: stats[path] for path in paths}, split, meta, config)
    _check_no_overlap(splits, stats)
    model_vocab = config.model_config().vocab_size
    _check_vocabulary(meta, config)
    for name, recorded in meta["files"].items():
        _check_id(folder / name, recorded.get("max_id", 0), model_vocab)
    if scan:
        _check_content(stats, folder, meta, config)
    return splits, meta


def _read_meta(folder: Path, config: TrainConfig) -> dict:
    path = folder / "meta.json"
    if not folder.is_dir():
        raise UserError(f"dataset={config.dataset!r}: there is no folder {folder}; {_how_to_make(folder)}")
    if not path.exists():
        tokenizer = '{"kind": "tiktoken", "name": "gpt2"}'
        wanted = f'{{"dtype": "uint16", "vocab_size": 50257, "tokenizer": {tokenizer}}}'
        raise UserError(
            f"no {path}, which says how the tokens are stored; {_how_to_make(folder)}, "
            f"or write it by hand, for example {wanted}"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        dtype, vocab_size = str(meta["dtype"]), int(meta["vocab_size"])
        files = {name: dict(recorded) for name, recorded in meta.get("files", {}).items()}
        for recorded in files.values():
            if "max_id" in recorded:
                recorded["max_id"] = int(recorded["max_id"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({type(error).__name__}: {error}); {_how_to_make(folder)}"
        ) from None
    if dtype not in DTYPES:
        raise UserError(f"{path}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if dtype == "uint16" and vocab_size > 65536:
        raise UserError(
            f"{path}: a vocabulary of {vocab_size} does not fit in uint16, so ids above 65535 have wrapped; "
            f"{_how_to_make(folder)}"
        )
    meta = {**meta, "vocab_size": vocab_size, "files": files}
    check_meta(path, meta)
    return meta


def _file_names(folder: Path, split: str) -> list[str]:
    names = os.listdir(folder)
    shards = (name for name in names if name.startswith(f"{split}_") and name.endswith(".bin"))
    return [f"{split}.bin"] if f"{split}.bin" in names else sorted(shards)


def _how_to_make(folder: Path) -> str:
    script = folder / "prepare.py"
    if script.exists():
        return f"make it with: python {os.path.relpath(script)}"
    shipped = ", ".join(sorted(path.parent.name for path in (ROOT / "data").glob("*/prepare.py")))
    return (
        f"data/ can make: {shipped}. For your own text: "
        f"python data/text/prepare.py --input FILES --tokenizer TOKENIZER --output {os.path.relpath(folder)}"
    )


def _check_names(paths: list[Path], split: str, meta: dict, folder: Path) -> None:
    """The shards found must be those that meta.json lists: one more or less makes another sequence."""
    listed = {name for name in meta["files"] if name.startswith(f"{split}_")}
    found = {path.name for path in paths}
    if listed and listed != found:
        name = min(listed ^ found)
        state = "is missing from" if name in listed else "is not listed in the meta.json of"
        raise UserError(f"{name} {state} {folder}, which was not copied whole; {_how_to_make(folder)}")


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
    dtype = DTYPES[meta["dtype"]]
    for path, stat in stats.items():
        size = stat.st_size
        if not size:
            raise UserError(f"{path} is empty; {_how_to_make(path.parent)}")
        if size % dtype.itemsize:
            raise UserError(
                f"{path} has {size} bytes, not a multiple of {dtype.itemsize} ({meta['dtype']}): "
                "it is truncated, or meta.json names another dtype"
            )
        recorded = meta["files"].get(path.name, {}).get("tokens")
        if recorded is not None and recorded != size // dtype.itemsize:
            raise UserError(
                f"{path} holds {size // dtype.itemsize:,} tokens, but meta.json records {recorded:,}; "
                f"{_how_to_make(path.parent)}"
            )
        if "sha256" not in meta["files"].get(path.name, {}):
            check_is_tokens(path)
    sizes = [stat.st_size for stat in stats.values()]
    files = TokenFiles(list(stats), sizes, dtype, config.model_config().vocab_size)
    if files.total < config.block_size + 1:
        raise UserError(
            f"the {split} split in {files.paths[0].parent} has {files.total:,} tokens, fewer than one window "
            f"of block_size + 1 = {config.block_size + 1:,}; use a smaller --block_size or more text"
        )
    return files


def _check_vocabulary(meta: dict, config: TrainConfig) -> None:
    model_vocab = config.model_config().vocab_size
    if meta["vocab_size"] > model_vocab:
        tokenizer = meta.get("tokenizer") or {}
        name = tokenizer.get("name", "its tokenizer") if isinstance(tokenizer, dict) else tokenizer
        raise UserError(
            f"dataset={config.dataset!r} has a vocabulary of {meta['vocab_size']:,} ({name}), but the "
            f"model's vocab_size={model_vocab:,}; use a dataset made with the model's tokenizer, "
            f"or set --vocab_size={meta['vocab_size']}"
        )


def _check_id(path: Path, largest: int, model_vocab: int) -> None:
    if largest >= model_vocab:
        raise UserError(
            f"{path} contains token id {largest:,}, beyond the model's vocab_size={model_vocab:,}; use a "
            "dataset made with the model's tokenizer, or a larger vocab_size"
        )


def _check_content(stats: dict[Path, os.stat_result], folder: Path, meta: dict, config: TrainConfig) -> None:
    """Checks the largest id and the hash of every file. A file read whole before is not read again."""
    recorded = {path: meta["files"].get(path.name, {}).get("sha256") for path in stats}
    stamps = {path: stamp(stat, meta["dtype"], recorded[path]) for path, stat in stats.items()}
    known = recall(folder)
    model_vocab, unread = config.model_config().vocab_size, []
    for path in stats:
        if path.name in known and known[path.name]["stamp"] == stamps[path]:
            _check_id(path, known[path.name]["max_id"], model_vocab)
        else:
            unread.append(path)
    size = sum(stats[path].st_size for path in unread)
    if unread and config.verify_data == "size":
        log.warning(
            "%d of %d token files in %s (%.1f GB) have not been read whole; verify_data='size' trusts them. "
            "python -m data.inspect %s --hash reads them",
            *(len(unread), len(stats), folder, size / 1e9, config.dataset),
        )
        return
    if size > LARGE:
        log.warning(
            "Reading %d token files in %s once, %.0f GB, to check hashes and ids. Stopped, it goes on from "
            "there; --verify_data=size would start at once and trust names, sizes and recorded ids",
            *(len(unread), folder, size / 1e9),
        )
    found, remembered_at = {}, time.monotonic()
    try:
        for path, sha256, largest in read_whole(unread, DTYPES[meta["dtype"]]):
            if recorded[path] not in (None, sha256):
                raise UserError(
                    f"{path} is not the file that meta.json describes (sha256 {sha256[:12]}..., recorded "
                    f"{recorded[path][:12]}...); {_how_to_make(folder)}"
                )
            found[path.name] = {"stamp": stamps[path], "max_id": largest}
            if time.monotonic() - remembered_at > REMEMBER_SECONDS:
                remember(folder, found)
                remembered_at = time.monotonic()
            _check_id(path, largest, model_vocab)
    finally:
        if found:
            remember(folder, found)
