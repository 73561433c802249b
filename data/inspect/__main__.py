"""Shows what is in a dataset: counts, and samples of its text from random places.

    python -m data.inspect quickstart

Refuses a folder whose files are not those that its meta.json describes: names and sizes always, hashes and
the largest id with --hash, which reads everything, and a run need not read it again. Samples begin anywhere,
so the first word may be half of one.
"""

# This folder has no __init__.py on purpose. If Python is started inside data/, `import inspect` looks there
# first. A folder without __init__.py is only used if no other entry of sys.path has a module of this name, so
# the standard library's inspect is found. With an __init__.py, this folder would be imported in its place.

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.arguments import user_path, whole_number
from common.command import run_command
from common.errors import UserError
from common.text import one_line
from data.folders import dataset_folder, how_to_make
from data.pipeline import token_files
from data.pipeline.dataset_tokenizer import load_tokenizer, names_tokenizer
from data.pipeline.meta_file import count_tokens, document_ends, read_meta
from data.pipeline.token_files import MASKED, SPLITS, described, is_of_split, plain_ids, stored_dtype
from data.pipeline.verified import damaged_files, forget, wrong_size
from data.tokenizers.tokenizer import Tokenizer


def check_files(folder: Path, meta: dict, hashes: bool) -> None:
    listed, again = described(meta["dtype"], meta["files"]), "run the dataset's prepare.py again"
    there = {name for split in SPLITS for name in token_files.token_file_names(folder, split)}
    for name in sorted(there - set(listed)):
        raise UserError(f"{folder / name} is not in meta.json; {again}")
    if wrong := wrong_size(folder, listed):
        raise UserError(f"{wrong}; {how_to_make(folder)}")
    if hashes and (damaged := damaged_files(folder, listed, True, meta["vocab_size"])):
        forget(folder, damaged)  # else prepare.py and train.py would trust its size and time
        raise UserError(f"{folder / min(damaged)} is not the file that meta.json describes; {again}")


def sample(
    folder: Path, meta: dict, split: str, count: int, length: int, rng: np.random.Generator
) -> Iterator[tuple[str, int, np.ndarray]]:
    """(file name, position, ids) of `count` random places, or conversations. A longer file is chosen more
    often."""
    files = {name: file["tokens"] for name, file in meta["files"].items() if is_of_split(name, split)}
    dtype, tokens = stored_dtype(meta["dtype"]), np.array(list(files.values()))
    for name in rng.choice(list(files), size=count, p=tokens / tokens.sum()) if tokens.any() else []:
        position = int(rng.integers(max(1, files[name] - length)))
        if meta["dtype"] == MASKED:
            lengths = np.fromfile(folder / token_files.lengths_name(name), "<u4").astype(np.int64)
            one = int(rng.integers(len(lengths)))
            position, length = int(lengths[:one].sum()), int(lengths[one])
        ids = np.fromfile(folder / name, dtype, count=length, offset=position * dtype.itemsize)
        yield name, position, ids


def show(ids: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """The text of these ids. What is a target of training is green on a terminal, else in double brackets, if
    other ids, which are negative, are not."""
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    is_chat = ids.min(initial=0) < 0
    begin, end = ("\x1b[32m", "\x1b[0m") if sys.stdout.isatty() else ("[[", "]]")
    shown = []
    for part in np.split(ids, np.flatnonzero(np.diff(ids < 0)) + 1):
        text = tokenizer.decode(plain_ids(part).tolist())
        shown.append(f"{begin}{text}{end}" if is_chat and part[0] >= 0 else text)
    return "".join(shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m data.inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("dataset", type=user_path, help="name of a folder in data/, or a path")
    add("--samples", type=whole_number(0, 10**4), default=3, help="of each split (default: 3)")
    add("--length", type=whole_number(1, 10**6), default=64, help="tokens of a sample (default: 64)")
    add("--seed", type=whole_number(0, 2**64 - 1), help="for the same places again")
    add("--hash", action="store_true", help="read every file, and check its hash and ids")
    args = parser.parse_args()
    folder = dataset_folder(args.dataset)
    meta = read_meta(folder)
    check_files(folder, meta, args.hash)
    recorded = meta["tokenizer"]
    tokenizer = load_tokenizer(folder) if names_tokenizer(recorded) else None
    name = recorded.get("name", recorded["kind"]) if tokenizer else "not in meta.json, so samples are ids"
    print(f"dataset    {folder}, from {one_line(meta['source'], 1000)}")
    print(f"tokenizer  {one_line(name)}, {meta['vocab_size']:,} ids, {document_ends(meta)}")
    for key in ("documents", "empty", "bad", "cut", "too_long", "targets"):
        if key in meta:
            print(f"{key:9s}  {meta[key]:,}")
    print(f"files      {len(meta['files'])}, {meta['dtype']}, {'hashes' if args.hash else 'sizes'} checked")
    for split, tokens in count_tokens(meta).items():
        print(f"{split:9s}  {tokens:,} tokens")
    rng = np.random.default_rng(args.seed)
    for split in SPLITS:
        for name, position, ids in sample(folder, meta, split, args.samples, args.length, rng):
            text = show(ids, tokenizer)
            print(f"\n--- {name} at {position:,} ---\n{text}")


if __name__ == "__main__":
    sys.exit(run_command(main))
