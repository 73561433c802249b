"""Shakespeare by GPT-2 tokens: the text and the split of data/shakespeare_char under the BPE of GPT-2."""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import user_path  # noqa: E402
from common.command import run_command  # noqa: E402
from data.pipeline.meta_file import report  # noqa: E402
from data.pipeline.small_dataset import write_dataset  # noqa: E402
from data.shakespeare_char.prepare import TRAIN_FRACTION, URL, read_text  # noqa: E402
from data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--input",
        type=user_path,
        metavar="FILE",
        help="a text file; without it tinyshakespeare is downloaded",
    )
    parser.add_argument(
        "--output", type=user_path, metavar="DIR", default=HERE, help="dataset folder (default: this one)"
    )
    args = parser.parse_args()

    text = read_text(args.input)
    tokenizer = TiktokenTokenizer("gpt2")
    cut = int(len(text) * TRAIN_FRACTION)
    splits = {"train": [tokenizer.encode(text[:cut])], "val": [tokenizer.encode(text[cut:])]}
    source = args.input or URL
    # eot_id is None: the play is one stream, and no end-of-text id is written into it.
    meta = write_dataset(
        args.output, splits, tokenizer.vocab_size, tokenizer.meta, eot_id=None, source=source
    )
    report(meta, args.output)


if __name__ == "__main__":
    sys.exit(run_command(main))
