"""Runs trials: each setting as a real train.py in fresh processes. A finished trial is kept in the folder and
not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench.plan import FIXED, Entry, iteration_flags
from bench.runner import LOG, run_entry, run_folder
from common.durable_file import write_json
from common.errors import UserError
from common.json_file import read_json, read_regular
from tools.tune.dimensions import DIMENSIONS, Keys, option_of
from tools.tune.space import Space
from tools.tune.steps import OutOfTime, Result
from training.process.run_lock import RunLock
from training.records.startup_info import git_state

# Keys that trials have of their own, so that nothing but training is in their time.
TRIAL_KEYS: Keys = {**FIXED, "checkpoint_interval": 0, "drift_check_interval": 0, "profile": None}
OUT_OF_MEMORY = re.compile(rb"out of (?:GPU )?memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.I)
LOG_BYTES = 1 << 26
ORPHAN_S = 20.0  # a process that was just started takes its lock after so long at the latest
FOLDER = "trials"  # of the results, in the output folder


class Trials:
    """Gives the result of a run of a setting: the one in the folder, or that of a run made now."""

    def __init__(
        self,
        space: Space,
        argv: list[str],
        folder: Path,
        options: argparse.Namespace,
        say: Callable[[str], None] = print,
    ):
        self.space, self.argv, self.folder, self.options, self.say = space, argv, folder, options, say
        self.until = time.monotonic() + options.budget
        self.code = git_state()
        self.started = 0  # trials of this command; the others were in the folder
        self.interrupted = False  # by Ctrl-C or SIGTERM, during a trial
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)

    def measure(self, setting: Keys, run: int) -> Result:
        """Raises OutOfTime if the run is not there and the budget is used up, or the user stops the trial."""
        path = self._path(setting, run)
        if found := read_result(path):
            return found
        if self.interrupted or time.monotonic() > self.until:
            raise OutOfTime
        self.started += 1
        try:
            result = self._start(setting, run)
        except KeyboardInterrupt:
            self.interrupted = True
            raise OutOfTime from None
        # only what would be the same again: other failures may be about the disk, the data or the machine
        if not result.reason or result.out_of_memory:
            write_json(path, asdict(result) | {"setting": setting})
        return result

    def _path(self, setting: Keys, run: int) -> Path:
        """Its name says what was measured, and on what: another config, GPU or code is another file."""
        config = self.space.config(setting).to_dict()
        del config["out_dir"]
        content = {
            "config": config,
            "trial": self.space.trial_keys(setting),
            "processes": self.space.processes,
            "machine": self.space.machine.versions,
            "memory": self.space.machine.memory.gib,
            "iterations": [self.options.iters, self._warmup(setting)],
            "dataset": self.options.dataset,
            "code": self.code,
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return self.folder / FOLDER / f"{digest[:16]}.{run}.json"

    def _warmup(self, setting: Keys) -> int:
        found = (option_of(one, setting) for one in DIMENSIONS if one.options)
        return max([self.options.warmup, *(option.warmup for option in found if option)])

    def flags(self, setting: Keys) -> list[str]:
        """Of train.py, for a trial."""
        keys = {**TRIAL_KEYS, **self.space.trial_keys(setting)}
        if self.options.tokens:
            keys["dataset"] = self.options.tokens
        iterations = iteration_flags(self.options.iters, self._warmup(setting))
        return [*(f"--{key}={value}" for key, value in keys.items()), *iterations]

    def _start(self, setting: Keys, run: int) -> Result:
        argv = [*self.argv, *self.flags(setting)]
        name = f"{setting['batch_size']}x{self.space.base.block_size}"
        entry = Entry("variant", name, argv, self.space.processes, self.space.base.device)
        number = next(n for n in itertools.count(1) if not run_folder(entry, n, self.folder).exists())
        arguments = argparse.Namespace(
            timeout=self.options.timeout, warmup=self._warmup(setting), keep_cache=True
        )
        run_entry(entry, number, self.folder, arguments, [entry])
        done, log = entry.runs[-1], run_folder(entry, number, self.folder) / LOG
        if done["reason"]:
            return Result(
                reason=done["reason"], out_of_memory=ran_out_of_memory(log), seconds=done["seconds"]
            )
        found = done["measurement"]
        mfu = statistics.median(found["mfu_percent"]) if found["mfu_percent"] else None
        return Result(tuple(found["tokens_per_sec"]), found["max_allocated_gb"], mfu, seconds=done["seconds"])

    def wait_for_orphans(self) -> None:
        """Returns when no trial of an earlier command runs any more: one that was killed leaves its trial
        behind, which would share the GPU with ours."""
        for path in sorted((self.folder / "runs").glob("*")):
            age = time.time() - path.stat().st_mtime
            if not any(path.glob("run_*.json")) and 0 <= age < ORPHAN_S:
                time.sleep(ORPHAN_S - age)
            until = time.monotonic() + self.options.timeout
            told = False
            while (path / "run.lock").exists() and not _is_free(path):
                if not told:
                    self.say(f"waiting for a trial that an earlier command has left behind: {path.name}")
                    told = True
                if time.monotonic() > until:
                    raise UserError(f"the trial in {path} does not end; stop its processes")


def _is_free(out_dir: Path) -> bool:
    with RunLock(out_dir) as lock:
        try:
            lock.acquire()  # waits for some seconds
        except UserError:
            return False
    return True


def ran_out_of_memory(log: Path) -> bool:
    try:
        return bool(OUT_OF_MEMORY.search(read_regular(log, LOG_BYTES)))
    except (OSError, ValueError):
        return False


def read_result(path: Path) -> Result | None:
    """None if there is none, or if it is damaged."""
    try:
        content = read_json(path)
        rows = tuple(float(rate) for rate in content["tokens_per_sec"])
        result = Result(
            rows,
            content["memory_gib"],
            content["mfu_percent"],
            content["reason"],
            bool(content["out_of_memory"]),
            float(content["seconds"]),
        )
        return result if result.reason or (rows and min(rows) > 0) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
