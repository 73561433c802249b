"""MosaicML's MDS shards as a dataset: folders of index.json and shard.*.mds, also compressed.

    python data/mds/prepare.py --input FOLDER --tokenizer hf:Qwen/Qwen3-1.7B-Base --tokens input_ids
        --lengths attention_mask --output data/my_corpus

With --tokens, the ids are taken as they are, and the lengths of the documents are stored beside them; a
document also ends where its sample ends. Without it, the column "text" is tokenized, and each document is
followed by the tokenizer's end-of-text id. The same command again goes on where it stopped.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import user_path  # noqa: E402
from common.command import run_command  # noqa: E402
from data.pipeline.command import TOKENIZER, make_dataset, make_parser, make_settings, parse  # noqa: E402
from data.pipeline.mds import find_shards  # noqa: E402
from data.pipeline.mds_samples import INTEGERS, wrong_numbers, wrong_text  # noqa: E402
from data.pipeline.units import Settings  # noqa: E402
from data.tokenizers.choice import find_eot, open_or_download_tokenizer  # noqa: E402
from data.tokenizers.tokenizer import SubwordTokenizer  # noqa: E402

CONFIGS = {151669: "config/cpt_qwen3_1.7b_4096.py"}  # by vocabulary, for the command printed at the end


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, HERE, val_fraction=0.001)
    add = parser.add_argument
    ends = "column of document lengths (default: documents end at end-of-text ids)"
    folders = "folders with an index.json"
    add("--input", nargs="+", required=True, type=user_path, metavar="FOLDER", help=folders)
    add("--tokenizer", required=True, type=user_path, metavar="NAME", help=f"of the ids: {TOKENIZER}")
    add("--tokens", metavar="COLUMN", help="column of token ids (default: text is tokenized)")
    add("--lengths", metavar="COLUMN", help=ends)
    of_bytes = "of ids in a column 'bytes' (default: int64)"
    add("--bytes_dtype", choices=INTEGERS, default="int64", help=of_bytes)
    add("--eot", metavar="TOKEN", help="end-of-text token (default: found by its name)")
    args = parse(parser)
    if args.lengths and not args.tokens:
        parser.error("--lengths are those of the documents in a column of ids; add --tokens COLUMN")
    if args.bos and args.tokens:
        parser.error("--bos would change the ids that --tokens takes as they are; leave one of them out")
    return args


def token_settings(args: argparse.Namespace, tokenizer: SubwordTokenizer) -> Settings:
    split_at = None if args.lengths else find_eot(tokenizer, args.eot)
    columns = (args.tokens, args.lengths, split_at, args.bytes_dtype)
    return Settings(None, None, args.val_fraction, args.shard_tokens, *columns, splits=args.splits)


def main() -> None:
    args = parse_arguments()
    columns = {"text": wrong_text}
    if args.tokens:
        columns = {column: wrong_numbers for column in filter(None, (args.tokens, args.lengths))}
    files = find_shards(args.input, columns)
    tokenizer = open_or_download_tokenizer(args.tokenizer)
    if args.tokens:
        settings, config = token_settings(args, tokenizer), CONFIGS.get(tokenizer.vocab_size)
    else:
        settings, config = make_settings(args, tokenizer, find_eot(tokenizer, args.eot)), None
    make_dataset(args, files, tokenizer, settings, " ".join(args.input), config)


if __name__ == "__main__":
    sys.exit(run_command(main))
