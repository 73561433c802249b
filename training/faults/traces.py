"""Writes what this process was doing when it was found to hang."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import torch

from common.durable_file import create


def write_stacks(path: Path) -> None:
    with create(path) as file:
        faulthandler.dump_traceback(file)


def write_collectives(path: Path) -> None:
    """Writes NCCL's flight recorder, even if NCCL itself has not noticed a timeout."""
    if not torch.cuda.is_available():
        return
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace")  # noqa: B009 - torch declares neither
    with create(path) as file:
        file.write(dump())
