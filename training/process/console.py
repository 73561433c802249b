"""Writes the log: rank 0's messages go to the console and to a file beside the run record. The other ranks
have neither.

A full disk or a closed console never ends a run: the first failure is a warning, and the next message is
tried again. What comes from a file or a library cannot steer the terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path

from tqdm import tqdm

from common.text import plain
from training.process.redaction import redact

log = logging.getLogger("nanomfu")


class Console(logging.Handler):
    """Writes above the progress bar instead of through it. Of failed writes, the first is a warning."""

    name_in_warning = "to the console"
    warned = False

    def emit(self, entry: logging.LogRecord) -> None:
        try:
            self.write(plain(redact(self.format(entry))) + "\n")
        except Exception as error:  # also of a message that cannot be formatted
            if not self.warned:
                self.warned = True
                with contextlib.suppress(OSError, ValueError):
                    text = f"warning: could not write {self.name_in_warning}: {error}; training goes on"
                    print(text, file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        tqdm.write(text, file=sys.stdout, end="")
        sys.stdout.flush()


class LogFile(Console):
    """Creates the file with the first message, and never opens one that others have put in its place."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.name_in_warning = path, str(path)
        self.descriptor: int | None = None
        self.flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL

    def write(self, text: str) -> None:
        if self.descriptor is None:
            self.descriptor = os.open(self.path, self.flags, 0o666)
            self.flags &= ~(os.O_CREAT | os.O_EXCL)
        content = text.encode("utf-8", "replace")
        try:
            if os.write(self.descriptor, content) != len(content):
                raise OSError("No space left on device")
        except OSError:  # the next message opens it again
            self.close()
            raise

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        with contextlib.suppress(OSError):
            if descriptor is not None:
                os.close(descriptor)


def start_logging(log_path: Path | None, console: bool = True) -> None:
    """Sends the 'nanomfu' logger to the console and to log_path. Without either, messages go nowhere."""
    for handler in log.handlers:
        handler.close()
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(Console() if console else logging.NullHandler())
    if log_path is not None:
        log.addHandler(LogFile(log_path))


def write_to_log_file(message: str) -> None:
    """Writes to the file alone: a message that the console got in another way, such as a run's last error.
    It takes no lock: the main thread may hold it, and hang in a write."""
    for handler in log.handlers:
        if isinstance(handler, LogFile):
            handler.emit(logging.makeLogRecord({"msg": message}))
