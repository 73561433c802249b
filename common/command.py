"""How every command but train.py ends: an error of the user is one line and status 2, without a
traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from common.errors import UserError

USER_ERROR, INTERRUPTED = 2, 128 + signal.SIGINT
OUTPUT_NOT_READ = 128 + signal.SIGPIPE  # what a shell shows of a program that writes to a closed pipe


def run_command(main: Callable[..., int | None], *arguments: object) -> int:
    """Calls main and returns the exit status of the command."""
    try:
        status = main(*arguments) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has seen enough: ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more
        return OUTPUT_NOT_READ
