"""Makes token files of nanoGPT's layout a dataset: train.bin and val.bin get the meta.json that they lack.

    python -m data.adopt FOLDER --tokenizer=gpt2

Reads both files whole, and refuses ids that the tokenizer does not have. meta.json then records hashes, token
counts and the end-of-text id. A meta.pkl is never unpickled, and no token file is changed.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from common.arguments import user_path
from common.command import run_command
from common.durable_file import write_json
from common.errors import UserError
from common.json_file import open_regular
from data.folders import dataset_folder
from data.pipeline.command import TOKENIZER
from data.pipeline.document_lengths import lengths_name
from data.pipeline.folder_lock import only_preparation
from data.pipeline.meta_file import describe, keep_tokenizer
from data.pipeline.next_commands import report
from data.pipeline.token_files import (
    DTYPES,
    SPLITS,
    check_is_tokens,
    looks_wider,
    smallest_dtype,
    stored_dtype,
    token_file_names,
)
from data.pipeline.verified import entry, read_whole, remember
from data.tokenizers.choice import find_eot, open_or_download_tokenizer
from data.tokenizers.tokenizer import SubwordTokenizer, file_hash, hash_tokenizer

CHUNK = 1 << 24  # tokens that are read at once
SOURCE = "token files that data.adopt found"


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}; name the one that holds train.bin and val.bin (a path contains a "
            "slash: ./NAME)"
        )


def find_token_files(folder: Path, dtype: np.dtype) -> list[Path]:
    """The files of both splits. Raises UserError for what cannot be token ids of this type."""
    check_folder(folder)
    if (folder / "plan.json").exists():
        raise UserError(f"{folder} was begun by a prepare.py; run that again, it makes meta.json")
    paths = []
    for split in SPLITS:
        names = token_file_names(folder, split)
        if not names:
            raise UserError(f"there is no {folder / split}.bin; a dataset needs train.bin and val.bin")
        paths += [folder / name for name in names]
    for path in paths:
        if path.with_name(lengths_name(path.name)).exists():
            raise UserError(f"{path} has document lengths beside it, which are not adopted; move them away")
        check_is_tokens(path)
        size = path.stat().st_size
        if not size:
            raise UserError(f"{path} is empty")
        if size % dtype.itemsize:
            raise UserError(
                f"{path} has {size:,} bytes, not a multiple of {dtype.itemsize} ({dtype.name}): it is "
                "truncated, or --dtype is another"
            )
    return paths


def check_meta_pkl(folder: Path) -> None:
    """nanoGPT's meta.pkl of characters names them under 'stoi'. Its bytes are searched, never unpickled."""
    path = folder / "meta.pkl"
    if not path.is_file():
        return
    with open_regular(path) as file:
        if b"stoi" in file.read(1 << 24):
            raise UserError(
                f"{path} says that the tokens of {folder} are characters, which no tokenizer makes again; "
                "make the dataset from its text: python data/shakespeare_char/prepare.py --input TEXT "
                "--output NEW_FOLDER"
            )


def describe_files(paths: list[Path], dtype: np.dtype, tokenizer: SubwordTokenizer) -> dict[str, dict]:
    """{name: what meta.json says of the file}, after reading all of it. Raises UserError."""
    files = {}
    for path, sha256, max_id in read_whole(paths, dtype):
        if max_id >= tokenizer.vocab_size:
            raise UserError(
                f"{path} holds token id {max_id:,}, but the tokenizer has ids 0 to "
                f"{tokenizer.vocab_size - 1:,} only; pass the --tokenizer that made it, or another --dtype"
            )
        tokens = path.stat().st_size // dtype.itemsize
        files[path.name] = {"tokens": tokens, "sha256": sha256, "max_id": max_id}
    hashes: dict[str, str] = {}
    for path in paths:
        twin = hashes.setdefault(str(files[path.name]["sha256"]), path.name)
        if twin != path.name:
            raise UserError(f"{path} holds the same as {twin}; training and validation need other text")
    return {path.name: files[path.name] for path in paths}


def holds(path: Path, dtype: np.dtype, token_id: int) -> bool:
    with open_regular(path) as file:
        while len(ids := np.fromfile(file, dtype, CHUNK)):
            if (ids == token_id).any():
                return True
    return False


def check_width(path: Path, dtype: np.dtype) -> None:
    with open_regular(path) as file:
        if looks_wider(np.fromfile(file, dtype, 1 << 16)):
            raise UserError(
                f"every second number in {path} is 0 or very small if ids are {dtype.name}, so they have "
                "more bits: pass --dtype=uint32; ids of 64 bits must be written again as uint32"
            )


def check_not_there(folder: Path) -> None:
    if os.path.lexists(folder / "meta.json"):
        raise UserError(
            f"{folder / 'meta.json'} is there: python -m data.inspect --hash compares the files with it. "
            "If it is wrong, delete it and run this command again"
        )


def _check_tokenizer_file(folder: Path, tokenizer: SubwordTokenizer) -> None:
    """keep_tokenizer() writes this file; one of somebody else's is not replaced."""
    path = folder / "tokenizer.json"
    if os.path.lexists(path) and file_hash(path) != hash_tokenizer(tokenizer):
        raise UserError(f"{path} is not the tokenizer that --tokenizer names; pass that one, or move it away")


def adopt(folder: Path, tokenizer: SubwordTokenizer, eot: str | None, dtype_name: str | None) -> dict:
    """Writes meta.json; returns its content. Raises UserError."""
    name = dtype_name or smallest_dtype(tokenizer.vocab_size)
    dtype = stored_dtype(name)
    paths = find_token_files(folder, dtype)
    check_width(paths[0], dtype)
    eot_id = find_eot(tokenizer, eot)  # what can be wrong is said before the files are read
    _check_tokenizer_file(folder, tokenizer)
    with only_preparation(folder):
        check_not_there(folder)
        entries = {path: entry(path, name, {}) for path in paths}  # before they are read: see entry()
        files = describe_files(paths, dtype, tokenizer)
        marked = any(holds(path, dtype, eot_id) for path in paths)
        meta = describe(tokenizer.vocab_size, {}, eot_id if marked else None, SOURCE, files)
        meta |= {"dtype": name, "tokenizer": keep_tokenizer(folder, tokenizer)}
        write_json(folder / "meta.json", meta)
        for path, known in entries.items():
            known["max_id"], known["stamp"][-1] = files[path.name]["max_id"], files[path.name]["sha256"]
        remember(folder, {path.name: known for path, known in entries.items()})
    if not marked:
        print(f"id {eot_id}, the end of a text, is not in the files: doc_masking and packing need it")
    return meta


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.adopt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dataset", type=user_path, help="name of a folder in data/, or a path")
    parser.add_argument(
        "--tokenizer",
        required=True,
        type=user_path,
        metavar="NAME",
        help=f"that made the ids: {TOKENIZER}",
    )
    parser.add_argument("--eot", metavar="TOKEN", help="end-of-text token (default: found by its name)")
    parser.add_argument("--dtype", choices=DTYPES, help="of an id (default: by the tokenizer's vocabulary)")
    args = parser.parse_args()
    folder = dataset_folder(args.dataset)
    check_folder(folder)  # before a tokenizer is downloaded
    check_meta_pkl(folder)
    meta = adopt(folder, open_or_download_tokenizer(args.tokenizer), args.eot, args.dtype)
    report(meta, folder)


if __name__ == "__main__":
    sys.exit(run_command(main))
