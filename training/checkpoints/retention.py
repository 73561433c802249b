"""Keeps the newest `keep_last` checkpoints that can be trusted, and the best; deletes the others.

The trap is a damaged checkpoint that counts as a good one: the last good one would then be deleted. So
nothing is deleted before enough newer checkpoints have been verified. Only rank 0 changes the folder.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from common.durable_file import write_bytes
from training.checkpoints.folder import by_loss, complete_checkpoints, delete
from training.checkpoints.verification import damage

log = logging.getLogger("nanomfu")


class Retention:
    """Updates the pointers and deletes checkpoints that are no longer needed. Remembers what it has verified,
    by size and time of every file, so that each checkpoint is read only once."""

    def __init__(self, keep_last: int | None):
        self.keep_last = keep_last  # None: all
        self.seen: dict[Path, tuple[list, bool]] = {}  # checkpoint -> (its files' stamp, whether it is valid)

    def is_valid(self, folder: Path) -> bool:
        stamp = _stamp(folder)
        if folder not in self.seen or self.seen[folder][0] != stamp:
            problems = damage(folder)
            if problems:
                log.warning("%s is damaged and does not count: %s", folder, "; ".join(problems))
            self.seen[folder] = stamp, not problems
        return self.seen[folder][1]

    def trust(self, folder: Path) -> None:
        """Counts a checkpoint as valid: it has just been written and read back."""
        self.seen[folder] = _stamp(folder), True

    def after_save(self, root: Path) -> None:
        """Updates the pointers, then deletes older checkpoints."""
        complete = complete_checkpoints(root)
        best = next(filter(self.is_valid, by_loss(complete)), None)
        for pointer, folder in (("latest", complete[-1]), ("best", best)):
            if folder:
                write_bytes(root / pointer, f"{folder.name}\n".encode())
            else:  # it may name one of another run
                (root / pointer).unlink(missing_ok=True)
        if self.keep_last is not None:
            self.prune(complete, best, self.keep_last)
        self.seen = {folder: seen for folder, seen in self.seen.items() if folder.exists()}

    def prune(self, complete: list[Path], best: Path | None, keep: int) -> None:
        """Deletes what is older than the newest `keep` valid ones. `complete` is oldest first."""
        kept = 0
        while complete and kept < keep:
            kept += self.is_valid(complete[-1])
            complete = complete[:-1]
        for folder in complete:
            if folder != best:
                delete(folder)


def _stamp(folder: Path) -> list[tuple]:
    """Names, sizes and times of a folder's files: while they stay the same, the files count as unchanged."""
    stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
