"""Finds out about other processes of this machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def python_name() -> str:
    """What a user types to start the Python that runs now."""
    return "python" if shutil.which("python") == sys.executable else sys.executable


def is_running(pid: int) -> bool:
    """Also of another user's process. A zombie does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether the process has ended, but torchrun has not yet read its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # the process has just ended, or this is not Linux
        return False
