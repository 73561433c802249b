"""MosaicML's MDS shards as a dataset: folders of index.json and shard.*.mds, also compressed.

    python data/mds/prepare.py --input FOLDER --tokenizer hf:Qwen/Qwen3-1.7B-Base --tokens input_ids
        --lengths attention_mask --output data/my_corpus

With --tokens, the ids are taken as they are, and the lengths of documents are stored beside them; a document
also ends with its sample. Without it, the column "text" is tokenized, with an end-of-text id after each.
"""

import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import user_path  # noqa: E402
from common.command import run_command  # noqa: E402
from data.pipeline.command import TOKENIZER, make_dataset, make_parser, make_settings, parse  # noqa: E402
from data.pipeline.mds import INTEGERS, Columns, find_shards, wrong_numbers  # noqa: E402
from data.tokenizers.choice import find_eot, open_or_download_tokenizer  # noqa: E402


def main() -> None:
    parser = make_parser(__doc__, HERE, val_fraction=0.001)
    add = parser.add_argument
    ends = "column of document lengths (default: documents end at end-of-text ids)"
    folders, of_bytes = "folders with an index.json", "of ids in a column 'bytes' (default: int64)"
    add("--input", nargs="+", required=True, type=user_path, metavar="FOLDER", help=folders)
    add("--tokenizer", required=True, type=user_path, metavar="NAME", help=f"of the ids: {TOKENIZER}")
    add("--tokens", metavar="COLUMN", help="column of token ids (default: text is tokenized)")
    add("--lengths", metavar="COLUMN", help=ends)
    add("--bytes_dtype", choices=INTEGERS, default="int64", help=of_bytes)
    add("--eot", metavar="TOKEN", help="end-of-text token (default: found by its name)")
    args = parse(parser)
    if args.lengths and not args.tokens:
        parser.error("--lengths are those of the documents in a column of ids; add --tokens COLUMN")
    if args.bos and args.tokens:
        parser.error("--bos would change the ids that --tokens takes as they are; leave one of them out")
    numbers = {column: wrong_numbers for column in (args.tokens, args.lengths) if column}
    wrong_text = lambda encoding: None if encoding == "str" else f"is {encoding!r:.40}, not 'str'"  # noqa: E731
    files = find_shards(args.input, numbers or {"text": wrong_text})
    tokenizer = open_or_download_tokenizer(args.tokenizer)
    eot_id = None if args.lengths else find_eot(tokenizer, args.eot)
    settings = make_settings(args, tokenizer, None if args.tokens else eot_id)
    columns = Columns(args.tokens, args.lengths, eot_id, args.bytes_dtype) if args.tokens else None
    args.config = "config/cpt_qwen3_1.7b_4096.py" if args.tokens and tokenizer.vocab_size == 151_669 else None
    make_dataset(args, files, tokenizer, replace(settings, columns=columns))


if __name__ == "__main__":
    sys.exit(run_command(main))
