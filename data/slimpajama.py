"""The command that every data/slimpajama_*/prepare.py is: one size of the text, one family's tokenizer."""

import argparse
import os
from pathlib import Path

from data.documents import find_files
from data.end_of_text import find_eot
from data.families import FAMILIES, open_family
from data.hub import download_dataset
from data.preparation import prepare
from data.tokens import DataError, report
from data.units import Settings

HUB_DATASETS = {"6b": "DKYoon/SlimPajama-6B", "627b": "cerebras/SlimPajama-627B"}


def parse_arguments(description: str, output: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", metavar="PATH", help="files, folders or quoted globs, instead of the download")
    add("--output", type=Path, default=output, metavar="DIR", help="dataset folder (default: the script's)")
    add("--tokenizer", metavar="NAME", help="tokenizer.json, tokenizer.model, their folder, or hf:OWNER/NAME")
    add("--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    add(
        "--val_fraction",
        type=float,
        default=0.001,
        help="of documents, where the input has no validation files",
    )
    add("--max_tokens", type=int, help="about this many tokens, from all parts of the input")
    add("--shard_tokens", type=int, default=1 << 28, help="most tokens in a file (default: 268 M)")
    add("--max_bad", type=int, default=0, help="bad records to leave out before giving up (default: 0)")
    add("--bos", metavar="TOKEN", help="token to begin each document with (default: none)")
    add("--resume", action=argparse.BooleanOptionalAction, default=True, help="keep what is already complete")
    add("--part", type=int, default=0, help="this machine's number, from 0")
    add("--num_parts", type=int, default=1, help="number of machines that share the work")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction={args.val_fraction} must lie between 0 and 1, for example 0.001")
    for name in ("workers", "max_tokens", "shard_tokens", "num_parts"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name}={value} must be at least 1")
    if not 0 <= args.part < args.num_parts:
        parser.error(f"--part={args.part} must lie between 0 and num_parts - 1 = {args.num_parts - 1}")
    if not args.resume and args.num_parts > 1:
        parser.error(
            "--no-resume would delete the work of other parts; empty the folder before starting them"
        )
    return args


def main(description: str, size: str, family_name: str, folder: Path):
    """A data/slimpajama_*/prepare.py."""
    args = parse_arguments(description, folder)
    family = FAMILIES[family_name]
    tokenizer = open_family(family, args.tokenizer)  # before a long download
    bos_id = None if args.bos is None else tokenizer.token_id(args.bos)
    if args.bos is not None and bos_id is None:
        raise DataError(f"--bos {args.bos}: the tokenizer has no such token")
    settings = Settings(find_eot(tokenizer, family.eot), bos_id, args.val_fraction, args.shard_tokens)
    if args.input is None:
        source = HUB_DATASETS[size]
        files = find_files([str(download_dataset(source, folder.parent / f"slimpajama_{size}_text"))])
    else:
        files = find_files(args.input)
        source = f"{len(files)} local files"
    meta = prepare(
        files,
        args.output,
        tokenizer,
        settings,
        source,
        args.workers,
        args.max_tokens,
        args.max_bad,
        args.resume,
        args.part,
        args.num_parts,
    )
    if meta is not None:
        print(f"docs   {meta['documents']:,}; {meta['empty']:,} empty, {meta['bad']:,} bad")
        report(meta, args.output, family.config)
