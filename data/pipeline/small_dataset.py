"""A small dataset, which one process writes in one pass over the text: train.bin, val.bin and meta.json.

preparation.py makes datasets of any size, with many processes.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from common.durable_file import create, sync, sync_folder
from common.errors import UserError
from data.pipeline.folder_lock import only_preparation
from data.pipeline.meta_file import describe, nanogpt_meta
from data.pipeline.token_files import SPLITS, smallest_dtype
from data.pipeline.token_writer import TokenWriter
from data.tokenizers.json_file import tokenizer_json


def write_dataset(
    folder: str | Path,
    splits: Mapping[str, Iterable[np.ndarray | list[int]]],
    vocab_size: int,
    tokenizer: dict,
    eot_id: int | None,
    source: str,
) -> dict:
    """Write train.bin, val.bin, meta.json and meta.pkl, all or nothing; returns what meta.json holds.

    splits is {"train": chunks of ids, "val": chunks of ids}; one chunk is in memory at a time. tokenizer is
    the .meta of a tokenizer. eot_id is the id that ends each document in the files, None when documents are
    not marked. A dataset that is already there stays whole until the new one is complete on disk.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with only_preparation(folder):
        if (folder / "plan.json").is_file():
            raise UserError(f"{folder} holds a dataset made otherwise; pass another --output, or empty it")
        dtype = smallest_dtype(vocab_size)
        names = [f"{split}.bin" for split in SPLITS] + ["meta.pkl"]
        if tokenizer["kind"] == "tokenizers":
            names.append("tokenizer.json")
        names.append("meta.json")  # last
        temporary = {name: folder / f"{name}.tmp" for name in names}
        writers = {split: TokenWriter(temporary[f"{split}.bin"], dtype, vocab_size) for split in SPLITS}
        try:
            for split, chunks in splits.items():
                for ids in chunks:
                    writers[split].write(ids)
            files = {f"{split}.bin": writers[split].finish() for split in SPLITS}
            for name, written in files.items():
                if written["tokens"] == 0:
                    raise UserError(
                        f"{name} of {folder} would hold no tokens; the input is too small to be split"
                    )

            if tokenizer["kind"] == "tokenizers":
                content = tokenizer_json(tokenizer["file"]).encode()
                _write_new(temporary["tokenizer.json"], content)
                sha256 = hashlib.sha256(content).hexdigest()
                tokenizer = {**tokenizer, "file": "tokenizer.json", "sha256": sha256}
            meta = describe(vocab_size, tokenizer, eot_id, source, files)
            _write_new(temporary["meta.json"], (json.dumps(meta, indent=2) + "\n").encode())
            _write_new(temporary["meta.pkl"], nanogpt_meta(vocab_size, tokenizer))
            for name in names:
                sync(temporary[name])

            # From here on, the folder holds files of two datasets, so the old meta.json is deleted first.
            (folder / "meta.json").unlink(missing_ok=True)
            for name in names:
                os.replace(temporary[name], folder / name)
            sync_folder(folder)
        finally:
            for writer in writers.values():
                writer.file.close()
            for path in temporary.values():
                path.unlink(missing_ok=True)
        return meta


def _write_new(path: Path, content: bytes) -> None:
    with create(path) as file:
        file.write(content)
