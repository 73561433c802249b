"""Saves checkpoints during training. What this rank writes is first copied to host memory; the loop waits
only for that copy. A thread writes the copy to files while training continues and changes the originals.

The trap is the other ranks. A collective in that thread would get between the collectives of the training, so
it uses none: ranks communicate through the file system. Each rank leaves a report beside its files. Rank 0
waits for all reports; the other ranks wait until the folder has its final name. A rank that fails raises the
error in its own loop within one iteration, which ends the run (training/faults/watchdog.py). That checkpoint
then does not exist; the earlier ones are complete.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.durable_file import sync_folder, write_bytes
from common.errors import RunError, UserError
from common.json_file import read_json
from training.checkpoints.folder import MANIFEST, OTHER, delete, delete_remains, others, set_aside
from training.checkpoints.retention import Retention
from training.checkpoints.saved_state import FORMAT, STATE
from training.checkpoints.staging import Staging, plan_parts
from training.checkpoints.tensor_files import SUFFIX, Part, write_parts
from training.checkpoints.train_state import Progress, TrainState
from training.checkpoints.verification import digest
from training.configuration.keys import TrainConfig
from training.process.memory import GB, GIB, free_host_bytes
from training.process.redaction import redact_all, without_logins
from training.process.run_lock import check_writable
from training.process.world import CpuGroup, from_rank_0, gather_objects

log = logging.getLogger("nanomfu")

WRITER_THREADS = 4  # files that a rank writes in parallel
FILE_BYTES = 256 << 20  # a rank writes one file, and one more for each of these 256 MiB
# bytes of host memory that each rank must have left: for Python, data workers, and files being written
HEADROOM = 0.5 * GB
ROOM = 1.2  # free bytes needed on the disk for each byte of a checkpoint
WRITE_TIMEOUT_S = 3600.0  # how long to wait for the other ranks to write their parts
POLL_S = 0.002, 0.25  # pause between two checks of the folder: the first, the longest

Work = list[tuple[Part, torch.Tensor]]


@dataclass
class Save:
    """One checkpoint that is being written, or has been."""

    root: Path
    progress: Progress
    token: str  # ends the temporary folder's name: equal on all ranks, new for every save
    is_first: bool  # the first save of this process
    note: str = ""  # added to the log line
    began: float = field(default_factory=time.monotonic)
    blocked_seconds: float = 0.0  # how long the loop has waited for it
    seconds: float = 0.0  # from the beginning of the save to its end
    error: Exception | None = None

    @property
    def final(self) -> Path:
        return self.root / f"step-{self.progress.iteration:08d}"

    @property
    def temporary(self) -> Path:
        return self.final.with_name(f"{self.final.name}.tmp-{self.token}")


class Saver:
    """Saves one run's checkpoints, one at a time. All ranks make the same calls, from the main thread."""

    def __init__(
        self,
        config: TrainConfig,
        state: TrainState,
        facts: dict[str, Any],
        start: int,
        host_memory: float = 0.0,
        group: CpuGroup = None,
    ):
        """`facts`: the run's name and its data's fingerprint; `start`: this process's first iteration;
        `host_memory`: bytes that the training takes of it in this process, from the first iteration on;
        `group`: all ranks' CPUs, to plan."""
        self.config, self.state, self.world, self.start = config, state, state.world, start
        self.root = Path(config.out_dir) / "checkpoints"
        self.facts = {
            "format": FORMAT,
            "world_size": self.world.size,
            "config": redact_all(config.to_dict(), without_logins),  # else the truth: a resume compares it
            "model_config": config.model_config().to_dict(),
            "tensors": state.described(),
            **facts,
        }
        self.retention = Retention(config.keep_last)
        self.host_memory, self.group = host_memory, group
        self.count = 0
        self.parts: list[Part] | None = None  # what this rank writes; None before prepare()
        self.staging: Staging | None = None
        self.save: Save | None = None  # the one that completed() has not returned yet
        self.thread: threading.Thread | None = None

    def prepare(self) -> list[Part]:
        """Divides the work among the ranks, checks for free disk space, allocates the host memory. Returns
        what this rank writes. All ranks, before the first save. Raises UserError."""
        self.run = from_rank_0(uuid.uuid4().hex[:8], self.world)
        self.parts, self.bytes = plan_parts(self.state.all_parts(), self.world, self.group)
        if self.world.is_main:
            delete_remains(self.root)
            if self.root.is_dir():  # perhaps a link to another disk
                check_writable(self.root)
            try:
                check_room(self.root, self.bytes)
            except OSError as error:
                raise UserError(f"no checkpoint could be saved: {error}") from None
        if self.config.async_checkpoint and self._have_memory(self.parts):
            self.staging = Staging(self.parts, self.world.device)
        return self.parts

    def _have_memory(self, parts: list[Part]) -> bool:
        """Whether each machine has room for the copies of all its ranks. All ranks, before any takes some."""
        copy, machine = sum(part.bytes for part in parts), self.world.local_size
        training = HEADROOM + max(0.0, self.host_memory - copy)  # what is copied is there already
        mine = machine * copy, machine * training, free_host_bytes()
        short = [one for one in gather_objects(mine, self.world) if one[0] + one[1] > one[2]]
        if short:
            log.warning(
                "async_checkpoint=True needs %.1f GiB of host memory besides %.1f GiB for the training, and "
                "%.1f GiB are free: training will wait while checkpoints are written",
                *(size / GIB for size in short[0]),
            )
        return not short

    def begin(self, progress: Progress, note: str = "", waited: float = 0.0) -> None:
        """Starts a checkpoint of the run as it is now. completed() must have returned the previous save;
        `waited`: seconds that the loop has waited for that."""
        assert self.save is None, self.save
        parts = self.prepare() if self.parts is None else self.parts
        save = Save(self.root, progress, f"{self.run}-{self.count}", self.count == 0, note)
        self.save, self.count = save, self.count + 1
        held = self.state.all_parts()
        tensors = [held[part] for part in parts]
        if self.staging:
            work = list(zip(parts, self.staging.copy(tensors), strict=True))
            self.thread = threading.Thread(target=self._run, args=(save, work), name="saver", daemon=True)
            self.thread.start()
        else:
            self._run(save, list(zip(parts, tensors, strict=True)))
        save.blocked_seconds = waited + time.monotonic() - save.began

    def completed(self, wait: float | None = 0.0) -> Save | None:
        """The save in progress, returned once, if it is complete within `wait` seconds (None: waits as long
        as it takes). Raises RunError if it failed."""
        if self.thread:
            self.thread.join(wait)
            if self.thread.is_alive():
                return None
        save, self.save, self.thread = self.save, None, None
        if save and save.error:
            raise RunError(f"could not write the checkpoint {save.final}: {save.error}") from save.error
        return save

    # --- in the thread; in the main thread if there is no host memory for the copy ---

    def _run(self, save: Save, work: Work) -> None:
        try:
            self._write(save, work)
        except Exception as error:  # the main thread must learn of every error
            save.error = error
            if self.world.is_main and save.temporary.is_dir():
                delete(save.temporary)
            elif not self.world.is_main and not save.temporary.is_dir():  # rank 0 has deleted it
                save.error = OSError("rank 0 could not complete it")
        save.seconds = time.monotonic() - save.began

    def _write(self, save: Save, work: Work) -> None:
        """The order makes a kill harmless at any moment; SYSTEM_OVERVIEW.md has the table."""
        rank, is_main = self.world.rank, self.world.is_main
        if is_main:
            _begin(save, self.bytes, self.start)
        else:
            _wait_until(save.temporary.is_dir, "rank 0 to begin")
        _report(save, rank, _write_files(save, rank, work))
        if not is_main:
            _wait_until(lambda: not save.temporary.exists(), "rank 0 to complete it")
            if not save.final.is_dir():
                raise OSError("rank 0 could not complete it")
            return
        files = _collect(save, self.world.size)
        _commit(save, files, {**self.facts, **save.progress.__dict__})
        _rename(save)
        _update_pointers(save, self.retention)


# --- the phases of a save: every rank calls _write_files and _report, rank 0 alone the others ---


def _begin(save: Save, size: int, start: int) -> None:
    save.root.mkdir(exist_ok=True)  # not its parents: an out_dir that was removed stays away
    if save.is_first and (found := others(save.root, start)):
        for folder in found:  # the oldest first: until the last, a resume finds what it found before
            set_aside(folder, OTHER)
        log.info(  # one message, as the loop logs meanwhile
            f"Checkpoints that this run did not come from are now step-N{OTHER} in {save.root}\n"
            f"  to delete them: rm -r {shlex.quote(str(save.root))}/step-*{OTHER}*"
        )
    delete_remains(save.root)
    check_room(save.root, size)
    save.temporary.mkdir()
    sync_folder(save.root.parent)


def check_room(root: Path, size: int) -> None:
    """Raises OSError if the disk has no space for a checkpoint of `size` bytes."""
    folder = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    need, free = ROOM * size, shutil.disk_usage(folder).free
    if free < need:
        raise OSError(
            f"{need / GB:.3g} GB are needed on the disk ({ROOM} times its size), {free / GB:.3g} GB are free "
            f"in {folder}; make room there, or choose another out_dir"
        )


def _write_files(save: Save, rank: int, work: Work) -> dict[str, dict]:
    """{name: digest} of this rank's files. Each file is read back after it was written."""
    files = {f"tensors-{rank:05d}-{n}{SUFFIX}": part for n, part in enumerate(_divide(work)) if part}

    def write(name: str) -> dict:
        path = save.temporary / name
        written = write_parts(path, files[name])
        if digest(path) != written:
            raise OSError(f"{name} does not read back as it was written")
        return written

    with ThreadPoolExecutor(WRITER_THREADS) as pool:
        return dict(zip(files, pool.map(write, files), strict=True))


def _divide(work: Work) -> list[Work]:
    """Divides the work into files of about the same size."""
    count = min(WRITER_THREADS, 1 + sum(part.bytes for part, _ in work) // FILE_BYTES)
    largest_first = sorted(work, key=lambda item: -item[0].bytes)
    return [largest_first[number::count] for number in range(count)]


def _report(save: Save, rank: int, files: dict[str, dict]) -> None:
    write_bytes(_report_path(save, rank), json.dumps(files).encode())


def _report_path(save: Save, rank: int) -> Path:
    return save.temporary / f"report-{rank:05d}.json"


def _collect(save: Save, ranks: int) -> dict[str, dict]:
    """{name: digest} of all ranks' files, once all ranks have reported."""
    files: dict[str, dict] = {}
    for rank in range(ranks):
        path = _report_path(save, rank)
        _wait_until(path.exists, f"rank {rank} to write its part; do all ranks share out_dir's disk?")
        files |= read_json(path)
        path.unlink()
    return files


def _commit(save: Save, files: dict[str, dict], state: dict) -> None:
    """Writes the manifest last: a folder without it is no checkpoint."""
    write_bytes(save.temporary / STATE, json.dumps(state, indent=1).encode())
    files[STATE] = digest(save.temporary / STATE)
    manifest = {
        "format": state["format"],
        "iteration": state["iteration"],
        "files": dict(sorted(files.items())),
    }
    write_bytes(save.temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_folder(save.temporary)


def _rename(save: Save) -> None:
    """From here on the checkpoint exists. It is an error if a folder of its name already exists."""
    os.rename(save.temporary, save.final)
    sync_folder(save.root)


def _update_pointers(save: Save, retention: Retention) -> None:
    retention.trust(save.final)
    retention.after_save(save.root)


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    pause, longest = POLL_S
    until = time.monotonic() + WRITE_TIMEOUT_S
    while not condition():
        if time.monotonic() > until:
            raise OSError(f"waited {WRITE_TIMEOUT_S:.0f} s for {what}")
        time.sleep(pause)
        pause = min(2 * pause, longest)
