"""The errors whose message is all that a user needs to see: no traceback is printed with them. And the
messages of Python's own errors that are about the machine."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":  # every command imports this module before what Windows lacks, such as fcntl
    sys.exit("error: Windows is not supported; use WSL: run `wsl --install`, then the same commands in it")

NO_MEMORY = "out of memory of the machine"


class UserError(ValueError):
    """Something the user can fix. Every command prints its message alone and exits with status 2."""


class RunError(RuntimeError):
    """The run cannot go on. train.py prints its message alone and exits with status 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether main memory, and not a GPU's, was not to be had: Python's error, or torch's."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def os_error_text(error: OSError) -> str:
    """With the file first, and the name of the link where a folder cannot be made because of one."""
    if not error.filename:
        return str(error)
    path = os.fsdecode(error.filename)
    if isinstance(error, FileExistsError) and os.path.islink(path) and not os.path.exists(path):
        return f"{path}: is a link to {os.readlink(path)}, which is not there"
    return f"{path}: {error.strerror}"
