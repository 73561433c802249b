"""A command that was removed: says what to write instead."""

import sys

from common.command import run_command
from common.errors import UserError
from data.pipeline.meta_file import NANOGPT


def main(argv: list[str]) -> int:
    raise UserError(
        f"data.adopt was removed; for token files in GPT-2's tokens, write FOLDER/meta.json: {NANOGPT}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
