"""The log: what a run says goes to the console and to a file beside the run record. Only rank 0 has either.

A full disk or a closed console never ends a run: what cannot be written is a warning, once, and the next
message is tried again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

from tqdm import tqdm

from training.process.redaction import redact

log = logging.getLogger("nanomfu")


class _Redacting(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        return redact(super().format(entry))


class _Patient:
    """A handler whose output cannot be written says so once on stderr, and tries again with the next
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
        """Lets go of what is half written."""


class _Console(_Patient, logging.Handler):
    """Prints above the progress bar instead of through it."""

    def emit(self, entry: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(entry), file=sys.stdout)
            sys.stdout.flush()
        except Exception:
            self.handleError(entry)

    def __str__(self) -> str:
        return "to the console"


class _LogFile(_Patient, logging.FileHandler):
    def emit(self, entry: logging.LogRecord) -> None:
        try:
            super().emit(entry)
        except OSError:  # it could not be opened
            self.handleError(entry)

    def abandon(self) -> None:
        """The next message opens the file anew."""
        stream, self.stream = self.stream, None
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.close()

    def __str__(self) -> str:
        return self.baseFilename


def start_logging(log_path: Path | None, console: bool = True) -> None:
    """Sends the 'nanomfu' logger to the console and to log_path. Without either, only the handlers go."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(_Console() if console else logging.NullHandler())
    if log_path is not None:
        log.addHandler(_LogFile(log_path, encoding="utf-8", delay=True))
    for handler in log.handlers:
        handler.setFormatter(_Redacting())


def write_to_log_file(message: str) -> None:
    """A message that the console got in another way, such as the error that ended the run."""
    for handler in log.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.emit(logging.makeLogRecord({"msg": message}))
