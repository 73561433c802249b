"""What the prepare.py of every large dataset shares: its options, and the call of prepare() with them."""

import argparse
import sys
from pathlib import Path

from common.arguments import check_output, real_number, user_folder, whole_number
from common.cgroups import usable_cores
from common.errors import UserError
from data.pipeline.documents import TEXT_KEY
from data.pipeline.next_commands import report
from data.pipeline.parts import Settings
from data.pipeline.preparation import prepare
from data.pipeline.workers import Job
from data.tokenizers.tokenizer import SubwordTokenizer, Tokenizer

WORKERS_MAX = 1024  # processes of one machine
TOKENS_MAX = 10**15
INPUT = "files, folders or quoted globs"  # for --help
TOKENIZER = "gpt2, a tokenizer.json or tokenizer.model, its folder, or hf:OWNER/NAME"


def make_parser(description: str | None, output: Path, val_fraction: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    cores, count = min(usable_cores(), WORKERS_MAX), whole_number(1, TOKENS_MAX)
    of_documents = f"of documents, where the input has no validation files (default: {val_fraction})"
    names = "whether names such as train, val or test of .jsonl and .parquet and their folders decide what "
    names += "they are for (default: names)"
    bad = "bad records to leave out before giving up (default: 0)"
    where = "dataset folder (default: the script's)"
    add("--output", type=user_folder, default=output, metavar="DIR", help=where)
    add("--workers", type=whole_number(1, WORKERS_MAX), default=cores, help="processes (default: one a core)")
    add("--val_fraction", type=real_number(1e-12, 1 - 1e-12), default=val_fraction, help=of_documents)
    add("--max_tokens", type=count, help="so many tokens, of every file a share")
    add("--shard_tokens", type=count, default=1 << 28, help="most tokens of a file (default: 268 M)")
    add("--max_bad", type=whole_number(0, TOKENS_MAX), default=0, help=bad)
    add("--splits", choices=("names", "ignore"), default="names", help=names)
    add("--bos", metavar="TOKEN", help="token to begin each document with (default: none)")
    add("--resume", action=argparse.BooleanOptionalAction, default=True, help="keep what is already complete")
    parser.set_defaults(store=None, source=None, config=None, text_key=TEXT_KEY)
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    if {word.partition("=")[0] for word in sys.argv} & {"--part", "--num_parts"}:
        parser.error("--part and --num_parts were removed: one machine makes the dataset; leave them out")
    args = parser.parse_args()
    check_output(args.output)
    return args


def make_settings(args: argparse.Namespace, tokenizer: Tokenizer | None, eot_id: int | None) -> Settings:
    """tokenizer: None for the settings of what a tokenizer is trained on."""
    bos_id = tokenizer.token_id(args.bos) if tokenizer and args.bos is not None else None
    if tokenizer and args.bos is not None and bos_id is None:
        raise UserError(f"--bos {args.bos}: the tokenizer has no such token")
    limits = args.shard_tokens, args.max_tokens
    return Settings(eot_id, bos_id, args.val_fraction, *limits, args.text_key, args.splits)


def make_job(args: argparse.Namespace) -> Job:
    return Job(args.workers, args.max_bad, args.resume, args.store)


def make_dataset(
    args: argparse.Namespace, files: list[Path], tokenizer: SubwordTokenizer, settings: Settings
) -> None:
    """Calls prepare() with these options, and prints a report. args.config: as report() has it."""
    source = args.source or " ".join(args.input)
    try:
        meta = prepare(files, args.output, tokenizer, settings, source, make_job(args))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what is complete is kept: the same command goes on") from None
    print(f"docs   {meta['documents']:,}; {meta['empty']:,} empty, {meta['bad']:,} bad")
    report(meta, args.output, args.config)
