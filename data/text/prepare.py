"""Your own text as a dataset, under any tokenizer, or under one that is trained on it.

    python data/text/prepare.py --input FOLDER --train_tokenizer=8000
    python data/text/prepare.py --input 'corpus/*.jsonl.zst' --tokenizer gpt2 --output data/my_corpus

Reads .txt, .md, .rst, .tex, .html and source code (a file is one document), .jsonl, .jsonl.gz, .jsonl.zst (a
line is one document, {"text": ...}) and .parquet. Of a folder, it lists the files that it leaves out. Each
document is followed by the tokenizer's end-of-text id. If the names of .jsonl and .parquet files or of their
folders say train, val or test, they are used so, and test is left out. Otherwise the text of a document and
--val_fraction decide: other files change nothing, and copies get into one split. The same command again goes
on where it stopped.
"""

import itertools
import sys
from argparse import Namespace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import user_path, whole_number  # noqa: E402
from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from data.pipeline import command  # noqa: E402
from data.pipeline.documents import TEXT_KEY, MissingColumn, is_one_document, read_records  # noqa: E402
from data.pipeline.input_files import find_files  # noqa: E402
from data.pipeline.trained_tokenizer import make_tokenizer  # noqa: E402
from data.tokenizers.bpe_training import EOT, EOT_ID, LEAST_IDS  # noqa: E402
from data.tokenizers.choice import EOT_NAMES, find_eot, open_or_download_tokenizer  # noqa: E402


def parse_arguments() -> Namespace:
    parser = command.make_parser(__doc__, HERE, val_fraction=0.01)
    add = parser.add_argument
    add("--input", nargs="+", required=True, type=user_path, metavar="PATH", help=command.INPUT)
    tokenizers = parser.add_mutually_exclusive_group(required=True)
    tokenizers.add_argument("--tokenizer", type=user_path, metavar="NAME", help=command.TOKENIZER)
    ids = whole_number(LEAST_IDS, 1 << 20)
    trained = "train a byte-level BPE of so many ids on the text: 8000 for some MB, 32000 for a GB"
    tokenizers.add_argument("--train_tokenizer", type=ids, metavar="IDS", help=trained)
    add("--eot", metavar="TOKEN", help=f"end-of-text token (default: {', '.join(EOT_NAMES)})")
    column = f"what holds the text in .jsonl and .parquet (default: {TEXT_KEY})"
    add("--text_key", default=TEXT_KEY, metavar="NAME", help=column)
    args = command.parse(parser)
    eot = args.eot or EOT
    if args.train_tokenizer and args.bos not in (None, eot):
        parser.error(f"--bos={args.bos}: the only special token of a trained tokenizer is {eot} (--eot)")
    return args


def main() -> None:
    args = parse_arguments()
    files = find_files(args.input)
    check_text_key(files, args.text_key)
    if args.tokenizer:
        tokenizer = open_or_download_tokenizer(args.tokenizer)
    else:
        trained, job = command.make_settings(args, None, EOT_ID), command.make_job(args)
        eot = args.eot or EOT
        tokenizer = make_tokenizer(files, args.output, args.train_tokenizer, eot, trained, job)
    settings = command.make_settings(args, tokenizer, find_eot(tokenizer, args.eot))
    command.make_dataset(args, files, tokenizer, settings)


def check_text_key(files: list[Path], text_key: str) -> None:
    """UserError if the first file of records has no such column, before anything is made."""
    for path in [path for path in files if not is_one_document(path)][:1]:
        for _, first in itertools.islice(read_records(path, text_key), 1):
            if isinstance(first, MissingColumn):
                raise UserError(str(first))


if __name__ == "__main__":
    sys.exit(run_command(main))
