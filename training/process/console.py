"""Writes the log: rank 0's messages go to the console and to a file beside the run record. The other ranks
have neither.

A full disk or a closed console never ends a run: the first failure is a warning, and the next message is
tried again. What comes from a file or a library cannot steer the terminal.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from pathlib import Path

from tqdm import tqdm

from common.text import plain
from training.process.redaction import redact

log = logging.getLogger("nanomfu")


class _Redacting(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        return plain(redact(super().format(entry)))


class _Patient:
    """A handler that survives failed writes: it warns once on stderr, and tries again with the next
    message."""

    warned = False

    def handleError(self, entry: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        self.abandon()
        if not self.warned:
            self.warned = True
            with contextlib.suppress(OSError, ValueError):
                print(
                    f"warning: could not write {self}: {error}; training goes on", file=sys.stderr, flush=True
                )

    def abandon(self) -> None:
        """Drops a half-written message."""


class _AboveBar:
    """Standard output, above the progress bar instead of through it."""

    def write(self, text: str) -> int:
        tqdm.write(text, file=sys.stdout, end="")
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


class _Console(_Patient, logging.StreamHandler):
    def __init__(self) -> None:
        super().__init__(_AboveBar())

    def __str__(self) -> str:
        return "to the console"


class _LogFile(_Patient, logging.FileHandler):
    """Creates the file, and never opens one that others have put in its place."""

    created = False

    def _open(self) -> io.TextIOWrapper:
        create = 0 if self.created else os.O_CREAT | os.O_EXCL
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | create
        stream = open(os.open(self.baseFilename, flags, 0o666), "a", encoding="utf-8", errors="replace")
        self.created = True
        return stream

    def emit(self, entry: logging.LogRecord) -> None:
        try:
            super().emit(entry)
        except OSError:  # it could not be opened
            self.handleError(entry)

    def abandon(self) -> None:
        """Closes the file; the next message opens it again."""
        stream, self.stream = self.stream, None
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.close()

    def __str__(self) -> str:
        return self.baseFilename


def start_logging(log_path: Path | None, console: bool = True) -> None:
    """Sends the 'nanomfu' logger to the console and to log_path. Without either, messages go nowhere."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(_Console() if console else logging.NullHandler())
    if log_path is not None:
        log.addHandler(_LogFile(log_path, delay=True))
    for handler in log.handlers:
        handler.setFormatter(_Redacting())


def write_to_log_file(message: str) -> None:
    """Writes to the file alone: a message that the console got in another way, such as a run's last error."""
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(logging.makeLogRecord({"msg": message}))
