"""Your own text as a dataset, under any tokenizer.

    python data/text/prepare.py --input 'corpus/*.jsonl.zst' --tokenizer gpt2 --output data/my_corpus

Reads .txt (a file is one document), .jsonl, .jsonl.gz, .jsonl.zst (a line is one document, {"text": ...}) and
.parquet. Each document is followed by the tokenizer's end-of-text id. Whether it trains or validates depends
only on its place and on --val_fraction: the same input gives the same split. A split that would get no
document gets the last one, or the end of an only one. The same command again goes on where it stopped.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import user_path  # noqa: E402
from common.command import run_command  # noqa: E402
from data.pipeline.command import make_dataset, make_parser, make_settings, parse  # noqa: E402
from data.pipeline.documents import find_files  # noqa: E402
from data.tokenizers.tokenizer import EOT_NAMES, find_eot, open_or_download_tokenizer  # noqa: E402

# Which config has a model for a tokenizer of this vocabulary size, for the command printed at the end.
CONFIGS = {
    50257: "config/full_gpt2_1.36b.py",
    32000: "config/full_llama_1.36b.py",
    128256: "config/full_llama3_1.5b_optimal.py",
    151669: "config/full_qwen3_1.8b_optimal.py",
}


def main() -> None:
    parser = make_parser(__doc__, HERE, val_fraction=0.01)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        type=user_path,
        metavar="PATH",
        help="files, folders or quoted globs",
    )
    add(
        "--tokenizer",
        required=True,
        type=user_path,
        metavar="NAME",
        help="gpt2, a tokenizer.json, tokenizer.model or vocab.json, their folder, or hf:OWNER/NAME",
    )
    add("--eot", metavar="TOKEN", help=f"end-of-text token (default: {', '.join(EOT_NAMES)})")
    args = parse(parser)
    files = find_files(args.input)
    tokenizer = open_or_download_tokenizer(args.tokenizer)
    settings = make_settings(args, tokenizer, find_eot(tokenizer, args.eot))
    config = CONFIGS.get(tokenizer.vocab_size)
    make_dataset(args, files, tokenizer, settings, " ".join(args.input), config)


if __name__ == "__main__":
    sys.exit(run_command(main))
