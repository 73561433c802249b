"""How every command ends: an error of the user is one message and status 2, without a traceback.

0 done · 1 failed · 2 an error that the user can fix · 130 Ctrl-C · 141 the reader of the output has ended
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TextIO

from common.errors import NO_MEMORY, UserError, is_out_of_memory, os_error_text
from common.text import MESSAGE_CHARACTERS, plain, shorten

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 128 + signal.SIGINT
OUTPUT_NOT_READ = 128 + signal.SIGPIPE  # what a shell shows of a program that writes to a closed pipe


def run_command(main: Callable[..., int | None], *arguments: object) -> int:
    """Calls main and returns the exit status of the command. train.py and bench/, whose ranks wait for each
    other, end in another way, but with the same outcome()."""
    prepare_output()
    status, message = outcome(main, *arguments)
    if message:
        say(message)
    return status


def prepare_output() -> None:
    """The first call of a process. Makes it possible to write to stdout and stderr, whatever they are: a
    stream that is closed is replaced, and a character that it cannot show is a question mark."""
    # A number that was closed is taken here; another file could get it otherwise, and a library's messages.
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(null)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def before_torch() -> None:
    """Says on a terminal that torch is imported, which takes seconds; ends a Python that has none."""
    if find_spec("torch") is None:
        message = "this Python has no torch; `make setup && source .venv/bin/activate` gives one that has it"
        print(f"error: {message}", file=sys.stderr)
        sys.exit(USER_ERROR)
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print("loading torch ...", file=sys.stderr, flush=True)


def outcome(main: Callable[..., int | None], *arguments: object) -> tuple[int, str]:
    """(exit status, what is to be said on stderr) of main(*arguments), whose output is written when this
    returns. An error that is a fault of this program is raised."""
    try:
        status, message = main(*arguments) or 0, ""
        sys.stdout.flush()
    except UserError as error:
        status, message = USER_ERROR, f"error: {error}"
    except KeyboardInterrupt as stop:
        status, message = INTERRUPTED, "; ".join(["interrupted", *map(str, stop.args)])
    except SystemExit as end:  # argparse has printed the help, or what is wrong with the arguments
        text = "" if end.code is None or isinstance(end.code, int) else str(end.code)
        status, message = FAILED if text else int(end.code or 0), text
    except BrokenPipeError:  # the reader of our output has seen enough: ... | head
        status, message = OUTPUT_NOT_READ, ""
    except OSError as error:  # a full disk, a missing permission: about the machine, and the user's to mend
        status, message = USER_ERROR, f"error: {os_error_text(error)}"
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        status, message = USER_ERROR, f"error: {NO_MEMORY}; see its limit with `ulimit -v` ({error})"
    flush(sys.stdout)
    return status, message


def say(message: str) -> None:
    """Prints on stderr, if stderr takes it."""
    with contextlib.suppress(OSError, ValueError):
        print(shorten(plain(message), MESSAGE_CHARACTERS), file=sys.stderr)
    flush(sys.stderr)


def flush(stream: TextIO) -> None:
    """Writes what the stream holds. If that fails, it goes nowhere: Python would write it once more when it
    ends, and report the error again."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
