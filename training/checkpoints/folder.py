"""Manages checkpoint folders: finds them, deletes them, and renames those that no run may use. Links
are not followed. If deleting fails, that is a warning: an old checkpoint is no reason to stop training. Only
rank 0 changes the folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import uuid
from pathlib import Path

from common.errors import UserError
from training.checkpoints.saved_state import read_state, step_number

MANIFEST = "manifest.json"
DAMAGED, OTHER = ".corrupt", ".before"  # end the names of checkpoints that were set aside
log = logging.getLogger("nanomfu")


# --- finding ---


def named_step(root: Path) -> list[Path]:
    """Everything in root whose name begins with step-. Raises OSError if root cannot be read, where glob()
    finds nothing: init_from='auto' would begin from scratch."""
    names = os.listdir(root) if root.is_dir() else []
    return [root / name for name in names if name.startswith("step-")]


def step_folders(root: Path) -> list[Path]:
    """Everything in root whose name is step- and a number, oldest first, complete or not."""
    numbers = {path: step_number(path) for path in named_step(root)}
    found = [(number, path) for path, number in numbers.items() if number is not None]
    return [path for _, path in sorted(found)]


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders that have a manifest, oldest first."""
    return [folder for folder in step_folders(root) if (folder / MANIFEST).is_file()]


def find_checkpoint(out_dir: Path, which: str = "latest") -> Path:
    """The newest complete checkpoint of out_dir, or the 'best', or the one of this name. Raises UserError."""
    root = out_dir / "checkpoints"
    complete = complete_checkpoints(root)
    if not complete:
        theirs = ". Its ckpt.pt is nanoGPT's, which is not read: docs/coming_from.md"
        raise UserError(
            f"{root} holds no complete checkpoint to resume or sample from; check --out_dir, or start a run "
            f"with --init_from=scratch{theirs if (out_dir / 'ckpt.pt').is_file() else ''}"
        )
    found = {"latest": complete[-1]}
    if best := by_loss(complete):
        found["best"] = best[0]
    found |= {folder.name: folder for folder in complete}
    if which not in found:
        raise UserError(f"{root} holds no checkpoint {which!r}; there are {', '.join(found)}")
    return found[which]


def by_loss(folders: list[Path]) -> list[Path]:
    """Of these checkpoints, the oldest first, those whose validation loss is of the same measure as that of
    the newest, the best first. It is read from each, because a kill may have left the pointer out of date."""
    losses, since = {}, 0
    for folder in folders:
        with contextlib.suppress(ValueError):  # damaged: loading it will report that
            saved = read_state(folder)
            if saved.val_loss is not None:
                losses[folder], since = saved.val_loss, saved.measured_since
    same = [folder for folder in losses if (step_number(folder) or 0) > since or not since]
    return sorted(same, key=lambda folder: losses[folder])


def check_root(out_dir: Path) -> None:
    """Raises UserError if out_dir/checkpoints is something else than a folder, or a link to one."""
    root = out_dir / "checkpoints"
    if os.path.lexists(root) and not root.is_dir():
        what = "a link that leads to no folder" if root.is_symlink() else "a file"
        raise UserError(
            f"{root} is {what}, so no checkpoint can be saved there or read from it; "
            f"remove it: rm {shlex.quote(str(root))}, or choose another --out_dir"
        )


# --- deleting ---


def delete(path: Path) -> None:
    """Renames first, so that nobody sees a half-deleted checkpoint; rmtree does not follow links."""
    if path.is_symlink():
        return
    doomed = path.with_name(f"{path.name.split('.tmp-')[0]}.tmp-delete-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(path, doomed)
        shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()
    except OSError as error:
        log.warning("could not delete %s: %s", path, error)


def delete_remains(root: Path) -> None:
    """Deletes what a killed save or a killed deletion left, and files that were to replace pointers."""
    for pattern in ("step-*.tmp-*", "latest.tmp[0-9]*", "best.tmp[0-9]*"):
        for path in root.glob(pattern):
            delete(path)


# --- out of the way ---


def others(root: Path, start: int) -> list[Path]:
    """The checkpoints, oldest first, that a run which began at iteration `start` did not come from."""
    return [folder for folder in step_folders(root) if (step_number(folder) or 0) > start]


def check_others(root: Path, start: int) -> None:
    """Raises UserError if a run that begins at `start` would set checkpoints aside for a second time: each
    set may be tens of gigabytes, and nothing deletes it but the user."""
    if (found := others(root, start)) and any(root.glob(f"step-*{OTHER}*")):
        raise UserError(
            f"{root} holds checkpoints that this run did not come from ({found[-1].name}), which it would "
            f"rename to step-N{OTHER}; but there are some already, and only one such set is kept. If you do "
            f"not need them: rm -r {shlex.quote(str(root))}/step-*{OTHER}*; or choose another --out_dir"
            f"{', or continue that run with --init_from=resume' if start == 0 else ''}"
        )


def set_aside(folder: Path, end: str) -> Path:
    """Renames a checkpoint so that no search finds it again: its name gets this end. Its files stay."""
    renamed = folder.with_name(f"{folder.name}{end}")
    return folder.rename(f"{renamed}-{uuid.uuid4().hex[:8]}" if os.path.lexists(renamed) else renamed)
