"""Shakespeare by characters: 65 symbols, about a million tokens, a model that trains in minutes on anything.

The text and the split (first 90 % of the characters train, the rest validate) are those of nanoGPT's dataset.
"""

import argparse
import hashlib
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import check_output, user_path  # noqa: E402
from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from common.json_file import read_regular  # noqa: E402
from data.huggingface import why_no_download  # noqa: E402
from data.pipeline.next_commands import report  # noqa: E402
from data.pipeline.preparation import write_dataset  # noqa: E402
from data.tokenizers.char_tokenizer import CharTokenizer  # noqa: E402
from data.tokenizers.tokenizer import Tokenizer  # noqa: E402

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TRAIN_FRACTION = 0.9
MOST_BYTES = 1 << 30  # of --input, which is read at once; data/text/prepare.py reads more


def read_text(path: str | None) -> str:
    """The text of a file; if path is None, tinyshakespeare from the network."""
    if path is not None:
        try:
            text = read_regular(Path(path), MOST_BYTES).decode("utf-8-sig")
            return text.replace("\r\n", "\n").replace("\r", "\n")
        except (OSError, ValueError) as error:
            raise UserError(f"--input {path} cannot be read as UTF-8 text: {error}") from error
    try:
        with urllib.request.urlopen(URL, timeout=30) as response:
            content = response.read()
        if hashlib.sha256(content).hexdigest() != SHA256:
            raise OSError(f"its answer, {len(content):,} bytes, is not tinyshakespeare")
    except OSError as error:
        raise UserError(
            f"{URL} could not be downloaded {why_no_download(error)}; get it elsewhere and use --input FILE"
        ) from error
    return content.decode("utf-8")


def prepare(description: str, folder: Path, make_tokenizer: Callable[[str], Tokenizer]) -> None:
    """The command line of this dataset and of data/shakespeare. `make_tokenizer` is given the text."""
    parser = argparse.ArgumentParser(description=description)
    text_file = "a text file; without it tinyshakespeare is downloaded"
    parser.add_argument("--input", type=user_path, metavar="FILE", help=text_file)
    where = "dataset folder (default: this one)"
    parser.add_argument("--output", type=user_path, metavar="DIR", default=folder, help=where)
    args = parser.parse_args()
    check_output(args.output)

    text = read_text(args.input)
    tokenizer = make_tokenizer(text)
    cut = int(len(text) * TRAIN_FRACTION)
    splits = {"train": [tokenizer.encode(text[:cut])], "val": [tokenizer.encode(text[cut:])]}
    # eot_id is None: the play is one stream, and no end-of-text id is written into it.
    meta = write_dataset(args.output, splits, tokenizer.vocab_size, tokenizer.meta, None, args.input or URL)
    report(meta, args.output)


def main() -> None:
    prepare(__doc__.splitlines()[0], HERE, lambda text: CharTokenizer("".join(sorted(set(text)))))


if __name__ == "__main__":
    sys.exit(run_command(main))
