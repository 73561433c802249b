"""Begins the record of a run: what it says first, its file, and the logger that adds the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.batches.sources import RunData
from training.checkpoints.resume import Resume
from training.checkpoints.train_state import Progress
from training.configuration.keys import TrainConfig
from training.hardware.capability import capability
from training.hardware.description import describe_hardware
from training.hardware.gpu_monitor import watch_gpus
from training.optimization.low_precision import emulation_warnings
from training.process.run_lock import RunLock
from training.process.world import World
from training.records.clock import Clock
from training.records.rows import Logger
from training.records.run_record import open_record
from training.records.startup_info import Setup, run_info, startup_info


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
) -> Logger:
    """The logger of this attempt, whose record is at `path`; rank 0 has the record. `progress`: where this
    process begins. All ranks."""
    monitor = watch_gpus(world)
    info = startup_info(config, world.size, setup, describe_hardware(world.device))
    support = setup.low_precision.get("low_precision", {}).get("support")
    info["warnings"] += emulation_warnings(config, capability(world.device), support)
    info |= run_info(config, world.size, data, resume, pretrained, monitor)
    record = open_record(config, world, lock, path, info, resume.run, progress.iteration)
    return Logger(config, world, record, Clock(world.device), setup.peak, info, progress, monitor)
