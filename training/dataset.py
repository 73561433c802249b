"""Token files and the checks on them. Every mismatch between tokens, meta.json and model is found here, on
the CPU, before the first step: on the GPU it would be an illegal memory access or, worse, a wrong loss.

data/NAME/ holds meta.json and, for each split, SPLIT.bin or shards SPLIT_*.bin: flat ids, one sequence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np

from training.config import ROOT, TrainConfig, UserError
from training.meta_file import check_is_tokens, check_meta, is_plain_name

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SCAN_TOKENS = 1 << 24  # ids read at a time
OPEN_FILES = 256  # a process may have 1024 open; a dataset, thousands of shards
LARGE = 10**9  # bytes; reading more takes seconds, so it is announced

log = logging.getLogger("nanomfu")


class TokenFiles:
    """The files of one split as one sequence of token ids, memory-mapped when first read."""

    def __init__(self, paths: list[Path], dtype: np.dtype):
        self.paths, self.dtype = paths, dtype
        self.starts = np.cumsum([0] + [path.stat().st_size // dtype.itemsize for path in paths])
        self.maps = {}

    @property
    def total(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """count ids from position start on, across file boundaries, and from the end on to the beginning."""
        pieces = []
        start %= self.total
        file = int(np.searchsorted(self.starts, start, side="right")) - 1
        while count > 0:
            offset = start - int(self.starts[file])
            piece = self._map(file)[offset : offset + count]
            pieces.append(piece)
            count, file = count - len(piece), (file + 1) % len(self.paths)
            start = int(self.starts[file])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _map(self, file: int) -> np.ndarray:
        tokens = self.maps.get(file)
        if tokens is None:
            if len(self.maps) >= OPEN_FILES:
                self.maps.clear()  # a view that is still in use keeps its own file open
            tokens = self.maps[file] = np.memmap(self.paths[file], dtype=self.dtype, mode="r")
        return tokens

    def __getstate__(self):
        return {**self.__dict__, "maps": {}}  # a worker process opens its own


def dataset_folder(config: TrainConfig) -> Path:
    """data/NAME, or the path itself if `dataset` contains a slash."""
    name = config.dataset
    if "/" in name or os.sep in name:
        return Path(name).expanduser()
    if not is_plain_name(name):
        raise UserError(f"dataset={name!r} is no name of a folder in data/; a path contains a slash")
    return ROOT / "data" / name


def needs_validation(config: TrainConfig) -> bool:
    return bool(config.eval_interval) or config.eval_only or config.eval_at_start


def open_dataset(config: TrainConfig, scan: bool) -> tuple[dict[str, TokenFiles], dict]:
    """The checked splits ('train', and 'val' if the run evaluates) and meta.json's content. Raises UserError.

    scan reads every file once, for its largest id and its hash, and remembers the result beside it; one rank
    of the run does that.
    """
    folder = dataset_folder(config)
    meta = _read_meta(folder, config)
    splits = {}
    for split in ("train", "val") if needs_validation(config) else ("train",):
        paths = sorted(folder.glob(f"{split}.bin")) or sorted(folder.glob(f"{split}_*.bin"))
        if not paths:
            raise UserError(f"no token file {folder}/{split}.bin; {_how_to_make(folder)}")
        _check_names(paths, split, meta, folder)
        splits[split] = _check_size(paths, split, meta, config)
    _check_vocabulary(meta, config)
    if scan:
        _check_ids([path for files in splits.values() for path in files.paths], folder, meta, config)
    return splits, meta


def _read_meta(folder: Path, config: TrainConfig) -> dict:
    path = folder / "meta.json"
    if not folder.is_dir():
        raise UserError(f"dataset={config.dataset!r}: there is no folder {folder}; {_how_to_make(folder)}")
    if not path.exists():
        wanted = '{"dtype": "uint16", "vocab_size": 50257}'
        raise UserError(
            f"no {path}, which says how the tokens are stored; {_how_to_make(folder)}, "
            f"or write it by hand, for example {wanted}"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        dtype, vocab_size = str(meta["dtype"]), int(meta["vocab_size"])
        files = {name: dict(recorded) for name, recorded in meta.get("files", {}).items()}
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
    """The shards that are there are those that meta.json lists: one more or less is another sequence."""
    listed = {name for name in meta["files"] if name.startswith(f"{split}_")}
    found = {path.name for path in paths}
    if listed and listed != found:
        name = min(listed ^ found)
        state = "is missing from" if name in listed else "is not listed in the meta.json of"
        raise UserError(f"{name} {state} {folder}, which was not copied whole; {_how_to_make(folder)}")


def _check_size(paths: list[Path], split: str, meta: dict, config: TrainConfig) -> TokenFiles:
    dtype = DTYPES[meta["dtype"]]
    for path in paths:
        size = path.stat().st_size
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
    files = TokenFiles(paths, dtype)
    if files.total < config.block_size + 1:
        raise UserError(
            f"the {split} split in {paths[0].parent} has {files.total:,} tokens, fewer than one window of "
            f"block_size + 1 = {config.block_size + 1:,}; use a smaller --block_size or more text"
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


# --- the scan ---


def _check_ids(paths: list[Path], folder: Path, meta: dict, config: TrainConfig) -> None:
    cache_path = folder / ".verified.json"
    cache = _read_cache(cache_path)
    model_vocab = config.model_config().vocab_size
    for path in paths:
        stat = path.stat()
        recorded = meta["files"].get(path.name, {}).get("sha256")
        stamp = [stat.st_size, stat.st_mtime_ns, meta["dtype"], recorded]
        entry = cache.get(path.name)
        if entry is None or entry["stamp"] != stamp:
            if stat.st_size > LARGE:
                log.warning("Reading %s once, %.0f GB, to check its ids and hash", path, stat.st_size / 1e9)
            max_id, sha256 = _scan(path, DTYPES[meta["dtype"]])
            if recorded is not None and recorded != sha256:
                raise UserError(
                    f"{path} is not the file that meta.json describes (sha256 {sha256[:12]}..., recorded "
                    f"{recorded[:12]}...); {_how_to_make(folder)}"
                )
            entry = cache[path.name] = {"stamp": stamp, "max_id": max_id}
            _write_cache(cache_path, cache)
        if entry["max_id"] >= model_vocab:
            raise UserError(
                f"{path} contains token id {entry['max_id']:,}, beyond the model's "
                f"vocab_size={model_vocab:,}; use a dataset made with the model's tokenizer, "
                "or a larger vocab_size"
            )


def _scan(path: Path, dtype: np.dtype) -> tuple[int, str]:
    """(largest id, sha256) in one pass."""
    digest, largest = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(SCAN_TOKENS * dtype.itemsize):
            digest.update(chunk)
            largest = max(largest, int(np.frombuffer(chunk, dtype).max()))
    return largest, digest.hexdigest()


def _read_cache(path: Path) -> dict:
    try:
        cache = json.loads(path.read_text())
        return {name: e for name, e in cache.items() if isinstance(e["max_id"], int) and e["stamp"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write_cache(path: Path, cache: dict) -> None:
    """Best effort: on a read-only dataset the scan is repeated at the next start."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(cache))
        os.replace(temporary, path)
    except OSError:
        return
