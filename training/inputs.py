"""Finds the errors of a run that can be found before its ranks join."""

from __future__ import annotations

from pathlib import Path

import torch

from training.batches.sources import Source, open_sources
from training.checkpoints.folder import check_root, find_checkpoint
from training.configuration.choices import find
from training.configuration.keys import TrainConfig
from training.hardware.capability import capability
from training.optimization.low_precision import require_low_precision
from training.pretrained.reading import check_weights
from training.process.launch import launch_info
from training.process.run_lock import RunLock, check_writable
from training.process.world import check_device


def check_inputs(config: TrainConfig, lock: RunLock) -> list[Source]:
    """Checks the device and out_dir, then opens the datasets. Raises UserError. Only rank 0 checks out_dir;
    one process of each machine reads the data."""
    rank, local_rank, _ = launch_info()
    check_device(config)
    here = capability(torch.device(config.device))
    require_low_precision(config, here)
    find("ffn_backend", config.ffn_backend).require(here)
    out_dir = Path(config.out_dir)
    if rank == 0:
        check_writable(out_dir)
        check_root(out_dir)
        if not config.eval_only:  # an evaluation alone writes only a record of its own
            lock.acquire()
        if config.init_from == "resume":
            find_checkpoint(out_dir, config.resume_from)  # raises UserError if there is none
    if local_rank == 0:
        check_weights(config)
    return open_sources(config, scan=local_rank == 0)
