"""Begins the record of a run: its file, what it says first, and the logger that adds the rows."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any

from common.run_records import JOURNAL
from training.batches.sources import RunData
from training.checkpoints.resume import Resume
from training.checkpoints.train_state import Progress
from training.configuration.keys import TrainConfig
from training.configuration.rules import tracker_names
from training.hardware.capability import capability
from training.hardware.description import describe_hardware
from training.hardware.gpu_monitor import watch_gpus
from training.optimization.low_precision import emulation_warnings
from training.process.console import start_logging
from training.process.run_lock import RunLock
from training.process.world import World, from_rank_0
from training.records.attempts import find_history
from training.records.clock import Clock
from training.records.follower import Follower
from training.records.rows import Logger
from training.records.run_record import RunRecord
from training.records.startup_info import Setup, accumulation_steps, run_info, startup_info


def new_record_path(config: TrainConfig) -> Path:
    """out_dir/run_YYYYMMDD_HHMMSS.json, a name that no earlier record has. An evaluation alone has eval_...,
    so that `run_*.json` does not find it."""
    name = Path(config.out_dir, f"{'eval' if config.eval_only else 'run'}_{datetime.now():%Y%m%d_%H%M%S}")
    paths = [Path(f"{name}{end}.json") for end in ("", *(f"_{i}" for i in range(2, 100)))]
    # lexists: a link that leads nowhere would be written through
    files = {path: (path, path.with_suffix(".log"), path.with_suffix(JOURNAL)) for path in paths}
    return next(path for path in paths if not any(map(os.path.lexists, files[path])))


def open_log(config: TrainConfig, world: World) -> Path:
    """The path of this run's record, the same on all ranks. Also opens the log beside it, which rank 0
    writes. All ranks."""
    path = from_rank_0(new_record_path(config) if world.is_main else None, world)
    start_logging(path.with_suffix(".log") if world.is_main else None, console=world.is_main)
    return path


def begin_record(
    config: TrainConfig,
    world: World,
    lock: RunLock,
    path: Path,
    setup: Setup,
    data: RunData,
    resume: Resume,
    pretrained: dict[str, Any] | None,
    progress: Progress,
    clock: Clock,
) -> Logger:
    """The logger of this attempt, whose record is at `path`; rank 0 has the record. `progress`: where this
    process begins; `clock`: of the log rows, the first of which begins now. All ranks."""
    monitor = watch_gpus(world)
    info = startup_info(config, world.size, setup, describe_hardware(world.device))
    support = setup.low_precision.get("low_precision", {}).get("support")
    info["warnings"] += emulation_warnings(config, capability(world.device), support)
    info |= run_info(config, world.size, data, resume, pretrained, monitor)
    record, follower, start = None, None, progress.iteration
    if world.is_main:
        keys = {**config.to_dict(), **accumulation_steps(config, world.size)}
        history = None if config.eval_only else find_history(path.parent, resume.run, info["launch"])
        record = RunRecord(path, keys, info, config.save_log_to_json, history, start, lock)
        if names := tracker_names(config):
            record.save(at_once=True)
            follower = Follower(names, path)
    clock.lap()
    return Logger(config, world, record, clock, setup.peak, info, progress, monitor, follower)
