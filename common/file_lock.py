"""Takes the lock of an open file; where the disk has no locks, warns and goes on.

It is a POSIX lock (lockf): the system releases it however the process ends, and it works across machines on
NFS. Not flock: forked data workers would inherit that and keep it for seconds after their parent was killed.
The trap of lockf: closing any descriptor of the file releases the lock, so nothing else may open the file.
"""

from __future__ import annotations

import errno
import fcntl
import logging
from pathlib import Path

log = logging.getLogger("nanomfu")


def take_lock(descriptor: int, path: Path, danger: str, wait: bool = False) -> bool:
    """Whether this process now has the lock of this file, which it may `wait` for. True, too, if the disk has
    no locks: then a warning says `danger`, what the user has to see to."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # another process holds it
            return False
        log.warning("%s cannot be locked (%s): %s", path, error.strerror, danger)
    return True
