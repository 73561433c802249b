"""Runs each trial as a real train.py in fresh processes. A finished trial is kept in the folder and not run
again."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import re
import statistics
import time
from pathlib import Path

from bench.plan import FIXED, Entry, iteration_flags
from bench.runner import LOG, run_entry, run_folder
from common.durable_file import write_json
from common.json_file import read_json
from tools.tune.ladder import OutOfTime, Result
from tools.tune.settings import Setting, Settings
from training.records.startup_info import git_state

# Keys that trials have of their own, so that nothing but training is in their time.
TRIAL_KEYS: Setting = {**FIXED, "checkpoint_interval": 0, "drift_check_interval": 0, "profile": None}
OUT_OF_MEMORY = re.compile(rb"out of (?:GPU )?memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.I)
GRAPHED_FROM = 12  # iterations 8 and 9 check the capture of a CUDA graph, and the first replays follow


class Trials:
    def __init__(self, settings: Settings, argv: list[str], folder: Path, options: argparse.Namespace):
        self.settings, self.argv, self.folder, self.options = settings, argv, folder, options
        self.until = time.monotonic() + options.budget
        self.code = git_state()
        self.interrupted = False  # by Ctrl-C or SIGTERM, during a trial
        (folder / "trials").mkdir(parents=True, exist_ok=True)

    def measure(self, setting: Setting, run: int) -> Result:
        """The result that is in the folder, or that of a run made now. Raises OutOfTime if there is none and
        the budget is used up, or the user stops the trial."""
        path = self._path(setting, run)
        try:
            found = read_json(path)
            kept = Result(**{**found, "tokens_per_sec": tuple(map(float, found["tokens_per_sec"]))})
            if kept.reason or min(kept.tokens_per_sec) > 0:
                return kept
        except (OSError, ValueError, TypeError, LookupError):  # not there, or damaged
            pass
        if self.interrupted or time.monotonic() > self.until:
            raise OutOfTime
        try:
            result = self._start(setting)
        except KeyboardInterrupt:
            self.interrupted = True
            raise OutOfTime from None
        # only what would be the same again: other failures may be about the disk, the data or the machine
        if not result.reason or result.out_of_memory:
            write_json(path, dataclasses.asdict(result))
        return result

    def _path(self, setting: Setting, run: int) -> Path:
        """Its name says what was measured, and on what: another config, GPU or code is another file."""
        config = {**self.settings.config(setting).to_dict(), "out_dir": None}
        machine = self.settings.machine
        content = [config, self._flags(setting), self.settings.processes, machine.facts, machine.memory.gib]
        text = json.dumps([*content, self.options.dataset, self.code], sort_keys=True)
        return self.folder / "trials" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.{run}.json"

    def _warmup(self, setting: Setting) -> int:
        return max(self.options.warmup, GRAPHED_FROM if setting["use_cuda_graphs"] else 0)

    def _flags(self, setting: Setting) -> list[str]:
        keys = {**TRIAL_KEYS, **self.settings.trial_keys(setting)}
        if self.options.tokens:
            keys["dataset"] = self.options.tokens
        flags = [f"--{key}={value}" for key, value in keys.items()]
        return flags + iteration_flags(self.options.iters, self._warmup(setting))

    def _start(self, setting: Setting) -> Result:
        name = f"{setting['batch_size']}x{self.settings.base.block_size}"
        argv = [*self.argv, *self._flags(setting)]
        entry = Entry("variant", name, argv, self.settings.processes, self.settings.base.device)
        number = next(n for n in itertools.count(1) if not run_folder(entry, n, self.folder).exists())
        arguments = argparse.Namespace(
            timeout=self.options.timeout, warmup=self._warmup(setting), keep_cache=True
        )
        run_entry(entry, number, self.folder, arguments, [entry])
        done = entry.runs[-1]
        if done["reason"]:
            log = run_folder(entry, number, self.folder) / LOG
            output = log.read_bytes() if log.is_file() else b""
            return Result(reason=done["reason"], out_of_memory=bool(OUT_OF_MEMORY.search(output)))
        found = done["measurement"]
        mfu = statistics.median(found["mfu_percent"]) if found["mfu_percent"] else None
        return Result(tuple(found["tokens_per_sec"]), found["max_allocated_gb"], mfu)
