"""Shakespeare by GPT-2 tokens: the text and the split of data/shakespeare_char under the BPE of GPT-2."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.command import run_command  # noqa: E402
from data.shakespeare_char.prepare import prepare  # noqa: E402
from data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer  # noqa: E402


def main() -> None:
    prepare(__doc__, HERE, lambda text: TiktokenTokenizer("gpt2"))


if __name__ == "__main__":
    sys.exit(run_command(main))
