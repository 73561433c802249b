"""Which checkpoints stay: the newest `keep_last` whose files verify, and the best. All of it is rank 0's.

The trap is a damaged checkpoint that counts as one: the last good one would be deleted for its sake. So
nothing is deleted before enough newer ones have been verified. Links are not followed, and what cannot be
deleted is a warning: an old checkpoint is no reason to stop training.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from pathlib import Path

from training.checkpoints.folder import (
    by_loss,
    complete_checkpoints,
    damage_of_share,
    step_folders,
    write_pointer,
)

log = logging.getLogger("nanomfu")


class Retention:
    """Keeps the pointers and deletes what is to spare. Remembers what it has verified, by size and time of
    every file, so that each checkpoint is read once."""

    def __init__(self, keep_last: int, keep_all: bool):
        self.keep_last, self.keep_all = keep_last, keep_all
        self.seen: dict[Path, tuple[list, bool]] = {}  # checkpoint -> (its files' stamp, whether it is valid)

    def is_valid(self, folder: Path) -> bool:
        stamp = _stamp(folder)
        if folder not in self.seen or self.seen[folder][0] != stamp:
            problems = damage_of_share(folder)
            if problems:
                log.warning("%s is damaged and does not count: %s", folder, "; ".join(problems))
            self.seen[folder] = stamp, not problems
        return self.seen[folder][1]

    def trust(self, folder: Path) -> None:
        """It has just been written, and read back."""
        self.seen[folder] = _stamp(folder), True

    def settle(self, root: Path) -> None:
        """After a save: the pointers move, then older ones go."""
        complete = complete_checkpoints(root)
        best = next(filter(self.is_valid, by_loss(complete)), None)
        for pointer, folder in (("latest", complete[-1]), ("best", best)):
            if folder:
                write_pointer(root / pointer, folder.name)
        if not self.keep_all:
            self.prune(complete, best)

    def prune(self, complete: list[Path], best: Path | None) -> None:
        """complete is oldest first."""
        kept = 0
        while complete and kept < self.keep_last:
            kept += self.is_valid(complete[-1])
            complete = complete[:-1]
        for folder in complete:
            if folder != best:
                delete(folder)


def _stamp(folder: Path) -> list[tuple]:
    stats = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def delete(path: Path) -> None:
    """Renamed first, so that a checkpoint is never seen half deleted; rmtree does not follow links."""
    if path.is_symlink():
        return
    doomed = path.with_name(f"{path.name.split('.tmp-')[0]}.tmp-delete-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(path, doomed)
        shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
    except OSError as error:
        log.warning("could not delete %s: %s", path, error)


def delete_remains(root: Path) -> None:
    """What a save or a deletion left that was killed."""
    for path in root.glob("step-*.tmp-*"):
        delete(path)


# --- putting aside ---


def set_aside(root: Path, start: int) -> Path | None:
    """Moves out of the way what this run, begun at iteration `start`, did not come from: the checkpoints
    of an earlier run, or those after the one that was chosen. Never deletes them."""
    after = [folder for folder in step_folders(root) if int(folder.name.removeprefix("step-")) > start]
    if not after:
        return None
    aside = _unused(root.with_name(f"checkpoints-before-{time.strftime('%Y%m%d_%H%M%S')}"))
    if start == 0:
        os.rename(root, aside)  # all at once: a kill must not leave half of another run's
        return aside
    aside.mkdir()
    for folder in reversed(after):  # the newest first: a resume never meets one without those before it
        os.rename(folder, aside / folder.name)
    return aside


def rename_damaged(folder: Path) -> Path:
    """So that no search finds it again; nothing is lost for whoever wants to look at it."""
    aside = _unused(folder.with_name(f"{folder.name}.corrupt"))
    os.rename(folder, aside)
    return aside


def _unused(path: Path) -> Path:
    return path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}") if os.path.lexists(path) else path
