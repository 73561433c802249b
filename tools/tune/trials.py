"""Runs each trial as a real train.py in fresh processes."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from pathlib import Path

from bench.plan import FIXED, Entry, iteration_flags
from bench.runner import LOG, run_entry, run_folder
from tools.tune.ladder import OutOfTime, Result
from tools.tune.settings import Setting, Settings

# Keys that trials have of their own, so that nothing but training is in their time.
TRIAL_KEYS: Setting = {**FIXED, "checkpoint_interval": 0, "drift_check_interval": 0, "profile": None}
OUT_OF_MEMORY = re.compile(rb"out of (?:GPU )?memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED", re.I)
GRAPHED_FROM = 12  # iterations 8 and 9 check the capture of a CUDA graph, and the first replays follow


class Trials:
    def __init__(self, settings: Settings, argv: list[str], folder: Path, options: argparse.Namespace):
        self.settings, self.argv, self.folder, self.options = settings, argv, folder, options
        self.until, self.started = time.monotonic() + options.budget, 0
        self.interrupted = False  # by Ctrl-C or SIGTERM, during a trial

    def measure(self, setting: Setting) -> Result:
        """Raises OutOfTime if the budget is used up, or the user stops the trial."""
        if self.interrupted or time.monotonic() > self.until:
            raise OutOfTime
        graphed = GRAPHED_FROM if setting["use_cuda_graphs"] else 0
        options = argparse.Namespace(
            timeout=self.options.timeout, warmup=max(self.options.warmup, graphed), keep_cache=True
        )
        keys = {**TRIAL_KEYS, **self.settings.trial_keys(setting)}
        if self.options.tokens:
            keys["dataset"] = self.options.tokens
        flags = [f"--{key}={value}" for key, value in keys.items()]
        argv = [*self.argv, *flags, *iteration_flags(self.options.iters, options.warmup)]
        name = f"{setting['batch_size']}x{self.settings.base.block_size}"
        entry = Entry("variant", name, argv, self.settings.processes, self.settings.base.device)
        self.started += 1
        try:
            run_entry(entry, self.started, self.folder, options, [entry])
        except KeyboardInterrupt:
            self.interrupted = True
            raise OutOfTime from None
        done = entry.runs[-1]
        if done["reason"]:
            log = run_folder(entry, self.started, self.folder) / LOG
            output = log.read_bytes() if log.is_file() else b""
            return Result(reason=done["reason"], out_of_memory=bool(OUT_OF_MEMORY.search(output)))
        found = done["measurement"]
        mfu = statistics.median(found["mfu_percent"]) if found["mfu_percent"] else None
        return Result(tuple(found["tokens_per_sec"]), found["max_allocated_gb"], mfu)
