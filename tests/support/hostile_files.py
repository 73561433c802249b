"""What the tests of damaged files share: files that are none, and the end of a test that hangs."""

import os
import signal
from pathlib import Path

import pytest
from support.helpers import HANG_S

DEEP = "[" * 500 + "]" * 500  # nested deeper than any file of ours


class Hang(BaseException):
    """Which nothing takes for an error of its own."""


@pytest.fixture(autouse=True)
def no_hang():
    def hangs(*_):
        raise Hang

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def replace(path: Path, kind: str) -> None:
    """Puts a file of another kind in its place."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")


def pairs(table: dict) -> list[tuple]:
    """(name, value) of a table that has several values for each name."""
    return [(name, value) for name, values in table.items() for value in values]
