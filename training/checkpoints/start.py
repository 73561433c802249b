"""Where a run starts: from nothing, or from a checkpoint. training/checkpoints/resume.py then chooses the checkpoint.

The trap is torchrun --max-restarts, which starts the same command line again. A run that began from scratch,
or from one certain checkpoint, must then go on from the newest that it saved itself: not begin again, and not
take one that was there before it. So the first start lists what is there, and a restart compares.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from training.configuration.keys import TrainConfig
from training.process.world import World, gather_objects, may_restart, restart_count

log = logging.getLogger("nanomfu")

EARLIER = "earlier.json"  # in checkpoints/: what was there before this run; moves away with it


def settle_start(config: TrainConfig, world: World) -> TrainConfig:
    """The configuration with init_from 'scratch' or 'resume', as it turns out. All ranks."""
    return gather_objects(_settle(config) if world.is_main else None, world)[0]


def _settle(config: TrainConfig) -> TrainConfig:
    root = Path(config.out_dir) / "checkpoints"
    there = _stamps(root)
    if restart_count():
        log.info(f"Restart {restart_count()} by torchrun: a process of this run had failed")
        if there.items() - _earlier(root).items():
            return replace(config, init_from="resume", resume_from="latest")
        log.info("It had saved no checkpoint, so it begins again as it began")
    elif may_restart() and root.is_dir():
        (root / EARLIER).write_text(json.dumps(there))
    if config.init_from == "auto":
        return replace(config, init_from="resume" if there else "scratch")
    return config


def _stamps(root: Path) -> dict[str, int]:
    """{name: time of its last change} of everything that is or was a checkpoint, whole or damaged: where one
    is, nothing begins from scratch by itself."""
    folders = [path for path in root.glob("step-*") if ".tmp-" not in path.name]
    return {path.name: path.stat().st_mtime_ns for path in folders}


def _earlier(root: Path) -> dict[str, int]:
    try:
        return json.loads((root / EARLIER).read_text())
    except FileNotFoundError:
        return {}
