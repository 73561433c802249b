"""Manages checkpoint folders: which are complete, which one to use, whether its files are what was written,
and which to keep: the newest `keep_last` whose files verify, and the best. It knows nothing of tensors.

The trap is a damaged checkpoint that counts as a good one: the last good one would then be deleted. So
nothing is deleted before enough newer checkpoints have been verified. Links are not followed. If deleting
fails, that is a warning: an old checkpoint is no reason to stop training. Only rank 0 changes the folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.errors import UserError
from training.process.world import World, gather_objects

FORMAT, READABLE = 2, (1, 2)
log = logging.getLogger("nanomfu")

MANIFEST, STATE = "manifest.json", "state.json"
HASH_THREADS = 4  # files hashed in parallel
HASH_CHUNK = 1 << 22  # bytes


def step_folders(root: Path) -> list[Path]:
    """Everything in root whose name is step- and a number, oldest first, complete or not."""
    return sorted(p for p in root.glob("step-*") if p.name.removeprefix("step-").isdigit())


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders that have a manifest, oldest first."""
    return [folder for folder in step_folders(root) if (folder / MANIFEST).is_file()]


def find_checkpoint(out_dir: Path, which: str = "latest") -> Path:
    """The newest complete checkpoint of out_dir, or the 'best', or the one of this name. Raises UserError."""
    root = out_dir / "checkpoints"
    complete = complete_checkpoints(root)
    if not complete:
        raise UserError(
            f"{root} holds no complete checkpoint to resume or sample from; check --out_dir, "
            "or start a run with --init_from=scratch"
        )
    found = {"latest": complete[-1]}
    if best := by_loss(complete):
        found["best"] = best[0]
    found |= {folder.name: folder for folder in complete}
    if which not in found:
        raise UserError(f"{root} holds no checkpoint {which!r}; there are {', '.join(found)}")
    return found[which]


def by_loss(folders: list[Path]) -> list[Path]:
    """The checkpoints with a validation loss, the best first. The loss is read from each checkpoint, because
    a kill may have left the pointer out of date."""
    losses = {folder: loss for folder in folders if (loss := _val_loss(folder)) is not None}
    return sorted(losses, key=lambda folder: losses[folder])


def _val_loss(folder: Path) -> float | None:
    try:
        return float(json.loads((folder / STATE).read_text())["val_loss"])
    except (OSError, ValueError, TypeError, KeyError):  # no loss, or damaged: loading it will report that
        return None


def read_state(folder: Path) -> dict:
    """state.json of a verified checkpoint."""
    try:
        state = json.loads((folder / STATE).read_text())
        version, _ = state["format"], state["model_config"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise damaged(folder, [f"{STATE} cannot be read ({error})"]) from None
    if version not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise UserError(f"{folder} has checkpoint format {version}; this version of nanoMFU reads {known}")
    return state


# --- verifying ---


def verify_checkpoint(folder: Path, world: World) -> None:
    """Compares every file with the manifest. All ranks, each for its share. UserError names the bad files."""
    if problems := damage(folder, world):
        raise damaged(folder, problems)


def damage(folder: Path, world: World) -> list[str]:
    """The problems of a checkpoint; none if its files are as they were written. All ranks."""
    shares = gather_objects(damage_of_share(folder, world.rank, world.size), world)
    return list(dict.fromkeys(problem for share in shares for problem in share))


def damage_of_share(folder: Path, share: int = 0, shares: int = 1) -> list[str]:
    try:
        files = sorted(recorded_files(folder).items())[share::shares]
    except ValueError as error:
        return [str(error)]
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return [problem for problem in pool.map(lambda item: _problem(folder, *item), files) if problem]


def recorded_files(folder: Path) -> dict[str, dict]:
    """{name: {sha256, bytes}} from the manifest. Raises ValueError if it is not a valid manifest."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        sizes = [recorded["bytes"] + len(recorded["sha256"]) for recorded in files.values()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from None
    outside = [name for name in files if os.path.basename(name) != name]
    if outside or STATE not in files or not sizes:
        raise ValueError(f"{MANIFEST} does not list a checkpoint's files")
    return files


def _problem(folder: Path, name: str, recorded: dict) -> str | None:
    path = folder / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != recorded["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes, recorded {recorded['bytes']:,}"
        return None if digest(path) == recorded else f"{name} does not match its sha256"
    except OSError as error:  # a bad sector, for example
        return f"{name} cannot be read ({error})"


def damaged(folder: Path, problems: list[str]) -> UserError:
    others = [p.name for p in complete_checkpoints(folder.parent) if p != folder]
    older = f"others are {', '.join(others[-3:])}" if others else "there is no other one"
    return UserError(f"the checkpoint {folder} is damaged: {'; '.join(problems)}; {older}")


def digest(path: Path) -> dict:
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK):
            sha256.update(chunk)
    return {"sha256": sha256.hexdigest(), "bytes": path.stat().st_size}


# --- writing ---


def write_pointer(path: Path, name: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a kill, or a link to somewhere else
    write_synced(temporary, name + "\n")
    os.replace(temporary, path)


def write_synced(path: Path, text: str) -> None:
    with open(path, "x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# --- which checkpoints stay ---


class Retention:
    """Updates the pointers and deletes checkpoints that are no longer needed. Remembers what it has verified,
    by size and time of every file, so that each checkpoint is read only once."""

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
        """Counts a checkpoint as valid: it has just been written and read back."""
        self.seen[folder] = _stamp(folder), True

    def after_save(self, root: Path) -> None:
        """Updates the pointers, then deletes older checkpoints."""
        complete = complete_checkpoints(root)
        best = next(filter(self.is_valid, by_loss(complete)), None)
        for pointer, folder in (("latest", complete[-1]), ("best", best)):
            if folder:
                write_pointer(root / pointer, folder.name)
        if not self.keep_all:
            self.prune(complete, best)

    def prune(self, complete: list[Path], best: Path | None) -> None:
        """Deletes what is older than the newest keep_last valid ones. `complete` is oldest first."""
        kept = 0
        while complete and kept < self.keep_last:
            kept += self.is_valid(complete[-1])
            complete = complete[:-1]
        for folder in complete:
            if folder != best:
                delete(folder)


def _stamp(folder: Path) -> list[tuple]:
    """Names, sizes and times of a folder's files: while they stay the same, the files count as unchanged."""
    stats = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


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
    """Deletes what a killed save or a killed deletion left."""
    for path in root.glob("step-*.tmp-*"):
        delete(path)


# --- moving out of the way ---


def move_aside(root: Path, start: int) -> Path | None:
    """Moves away the checkpoints that this run, which began at iteration `start`, did not come from: those of
    an earlier run, or those after the one that was chosen. Never deletes them."""
    after = [folder for folder in step_folders(root) if int(folder.name.removeprefix("step-")) > start]
    if not after:
        return None
    aside = _unused(root.with_name(f"checkpoints-before-{time.strftime('%Y%m%d_%H%M%S')}"))
    if start == 0:
        os.rename(root, aside)  # all at once: a kill must not leave half of another run here
        return aside
    aside.mkdir()
    for folder in reversed(after):  # newest first: a resume never finds one without those before it
        os.rename(folder, aside / folder.name)
    return aside


def rename_damaged(folder: Path) -> Path:
    """Renames a checkpoint so that no search finds it again. Its files stay, so they can be examined."""
    renamed = _unused(folder.with_name(f"{folder.name}.corrupt"))
    os.rename(folder, renamed)
    return renamed


def _unused(path: Path) -> Path:
    return path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}") if os.path.lexists(path) else path
