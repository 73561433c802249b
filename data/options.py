"""Values of the data commands' options: refused on the command line where they cannot be meant."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

MOST_PARTS = 100_000
MOST_WORKERS = 1024  # processes of one machine
MOST_TOKENS = 10**15


def folder_path(text: str) -> Path:
    """A path, with ~ for the home folder. The empty text would mean the folder where the command runs."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; name a file or a folder")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~NAME of nobody
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def text_path(text: str) -> str:
    """As folder_path, but the text as it is: a dataset's name, a glob, or a path that begins with ./"""
    folder_path(text)
    return os.path.expanduser(text)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text:.80} is not a whole number") from None
        if not least <= value <= most:
            limit = f"at least {least:,}" if value < least else f"at most {most:,}"
            raise argparse.ArgumentTypeError(f"{text:.80} must be {limit}")
        return value

    return parse
