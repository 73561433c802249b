"""The errors of data/, and how a command shows them to the user."""

import sys
from collections.abc import Callable


class DataError(ValueError):
    """Something that the user can fix. The message says what is wrong and what to do."""


class EncodeError(Exception):
    """A text that the tokenizer's library cannot encode."""


def run_command(main: Callable[[], None]) -> None:
    """Run the main function of a command. A DataError becomes one line, without a traceback, and status 1."""
    try:
        main()
    except DataError as error:
        sys.exit(f"error: {error}")
