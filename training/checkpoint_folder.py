"""Checkpoint folders: which are complete, which one to use, whether its files are what was written, and how
one is put aside or deleted. Knows nothing of tensors; training/checkpoint.py does, and documents the format.
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

from training.config import UserError
from training.distributed import World, gather_objects

log = logging.getLogger("nanomfu")

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
HASH_THREADS = 4  # files hashed side by side
HASH_CHUNK = 1 << 22  # bytes


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoint directories that were committed, oldest first."""
    folders = (p for p in root.glob("step-*") if p.name.removeprefix("step-").isdigit())
    return sorted(p for p in folders if (p / MANIFEST).is_file())


def find_checkpoint(out_dir: Path, which: str = "latest") -> Path:
    """The newest complete checkpoint of out_dir, or the 'best', or one by its name. Raises UserError."""
    root = out_dir / "checkpoints"
    complete = {folder.name: folder for folder in complete_checkpoints(root)}
    _warn_about_incomplete(root, list(complete))
    if not complete:
        raise UserError(
            f"{root} holds no complete checkpoint to resume or sample from; check --out_dir, "
            "or start a run with --init_from=scratch"
        )
    found = {"latest": list(complete.values())[-1], "best": lowest_loss(list(complete.values()))} | complete
    if not found.get(which):
        raise UserError(
            f"{root} holds no checkpoint {which!r}; "
            f"there are {', '.join(name for name, folder in found.items() if folder)}"
        )
    return found[which]


def _warn_about_incomplete(root: Path, complete: list[str]) -> None:
    for path in sorted(root.glob("step-*")):
        if path.name.removeprefix("step-").isdigit() and path.name not in complete:
            log.warning("%s has no %s: it is damaged and is passed over", path, MANIFEST)


def lowest_loss(folders: list[Path]) -> Path | None:
    """The best by the losses in the checkpoints themselves: a kill may have left the pointer behind."""
    losses = {folder: _val_loss(folder) for folder in folders}
    evaluated = [folder for folder in folders if losses[folder] is not None]
    return min(evaluated, key=losses.get) if evaluated else None


def _val_loss(folder: Path) -> float | None:
    try:
        return json.loads((folder / STATE).read_text())["val_loss"]
    except (OSError, ValueError, TypeError, KeyError):  # damaged: whoever wants to load it will hear of it
        return None


def read_state(folder: Path) -> dict:
    """state.json of a verified checkpoint."""
    try:
        state = json.loads((folder / STATE).read_text())
        version, _ = state["format"], state["model_config"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(folder, f"{STATE} cannot be read ({error})") from None
    if version != FORMAT:
        raise UserError(f"{folder} has checkpoint format {version}; this version reads {FORMAT}")
    return state


# --- verifying ---


def verify_checkpoint(folder: Path, world: World) -> None:
    """Compares every file with the manifest. All ranks, each its share. UserError names the bad files."""
    try:
        files = sorted(json.loads((folder / MANIFEST).read_text())["files"].items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({error})") from None
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        mine = pool.map(lambda item: _problem(folder, *item), files[world.rank :: world.size])
    problems = [p for part in gather_objects(list(mine), world) for p in part if p]
    if problems:
        raise _damaged(folder, "; ".join(problems))


def _problem(folder: Path, name: str, recorded: dict) -> str | None:
    path = folder / name
    if os.path.basename(name) != name or not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != recorded["bytes"]:
        return f"{name} has {path.stat().st_size:,} bytes, recorded {recorded['bytes']:,}"
    if digest(path) != recorded:
        return f"{name} does not match its sha256"
    return None


def _damaged(folder: Path, problem: str) -> UserError:
    others = [p.name for p in complete_checkpoints(folder.parent) if p != folder]
    older = f"rename that folder to resume from {others[-1]} instead" if others else "there is no other one"
    return UserError(f"the checkpoint {folder} is damaged: {problem}; {older}")


def digest(path: Path) -> dict:
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK):
            sha256.update(chunk)
    return {"sha256": sha256.hexdigest(), "bytes": path.stat().st_size}


# --- keeping ---


def set_aside(out_dir: Path) -> Path | None:
    """Moves an earlier run's checkpoints out of the way of a new one; never deletes them. Rank 0 only."""
    root = out_dir / "checkpoints"
    if not complete_checkpoints(root):
        return None
    aside = out_dir / f"checkpoints-before-{time.strftime('%Y%m%d_%H%M%S')}"
    os.rename(root, aside)
    return aside


def delete(folder: Path) -> None:
    """Renamed first, so that a checkpoint is never seen half deleted; rmtree does not follow links."""
    if folder.is_symlink():
        return
    doomed = folder.with_name(f"{folder.name.split('.tmp-')[0]}.tmp-delete-{uuid.uuid4().hex[:8]}")
    try:
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    except OSError as error:  # an undeletable old checkpoint is no reason to stop training
        log.warning("could not delete %s: %s", folder, error)


def write_pointer(path: Path, name: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    write_synced(temporary, name + "\n")
    os.replace(temporary, path)


def write_synced(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
