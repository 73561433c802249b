"""Runs each trial as a real train.py in fresh processes."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from bench.plan import FIXED, UNDISTURBED, Entry, as_flags, iteration_flags
from bench.runner import run_entry
from tools.tune.ladder import OutOfTime, Run
from tools.tune.settings import Setting, Settings

# Keys that trials have of their own, so that nothing but training is in their time.
TRIAL_KEYS: Setting = {**FIXED, **UNDISTURBED, "profile": None}
GRAPHED_FROM = 12  # iterations 8 and 9 check the capture of a CUDA graph, and the first replays follow


class Trials:
    """argv: the config and its flags. options: those of the command."""

    def __init__(self, settings: Settings, argv: list[str], folder: Path, options: argparse.Namespace):
        self.settings, self.argv, self.folder, self.options = settings, argv, folder, options
        self.until, self.started = time.monotonic() + options.budget, 0

    def measure(self, setting: Setting) -> Run:
        """Raises OutOfTime if the budget is used up."""
        if time.monotonic() > self.until:
            raise OutOfTime
        graphed = GRAPHED_FROM if setting["use_cuda_graphs"] else 0
        options = argparse.Namespace(
            timeout=self.options.timeout, warmup=max(self.options.warmup, graphed), keep_cache=True
        )
        argv = [*self.argv, *as_flags({**TRIAL_KEYS, **self.settings.trial_keys(setting)})]
        argv += iteration_flags(self.options.iters, options.warmup)
        name = f"{setting['batch_size']}x{self.settings.base.block_size}"
        entry = Entry("variant", name, argv, self.settings.processes, self.settings.base.device)
        self.started += 1
        run_entry(entry, self.started, self.folder, options, [entry])
        return entry.runs[0]
