"""A trial: one run of bench.throughput, for tools.tune and tools.profile, on GPUs that nobody else uses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.json_file import read_json
from common.text import one_line
from training.memory.gpus import DeviceMemory, device_memory
from training.process.memory import GIB

UNDISTURBED = ("--checkpoint_interval=0", "--drift_check_interval=0", "--replay_check_interval=0")
OWN_GIB = 3.0  # of a GPU: the driver, and the context of the process that asks


def run_trial(arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    """The entries of the table that bench.throughput writes into this new folder. Ctrl-C reaches only this
    process, which then stops the other one and what that has started. Raises UserError without a table."""
    if folder.exists():
        raise UserError(f"{folder} has a trial, which may still run; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    command = [sys.executable, "-m", "bench.throughput", "--keep_cache", f"--output={folder}", *UNDISTURBED]
    command += arguments
    with (
        log.open("w") as out,
        subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True) as run,
    ):
        try:
            run.wait()
        finally:
            run.terminate()  # nothing, if it has ended
    try:
        return read_json(folder / "table.json")["entries"]
    except (OSError, ValueError, LookupError):
        last = (log.read_text(errors="replace").splitlines() or [""])[-1]
        raise UserError(f"bench.throughput: {one_line(last, 300)}") from None


def look_at(device: str, processes: int) -> DeviceMemory:
    """What each process has. It asks in a process of its own, whose context would otherwise stay in a GPU's
    memory beside the trials. Raises UserError if there are too few GPUs, or others use them."""
    gpus = torch.cuda.device_count()
    for number in range(processes if device == "cuda" else 0):
        if number == gpus:
            raise UserError(f"--nproc={processes} needs as many GPUs, but torch sees {gpus}; or --device=cpu")
        free, total = torch.cuda.mem_get_info(number)
        if total - free > OWN_GIB * GIB:
            raise UserError(
                f"GPU {number} is in use: {(total - free) / GIB:.1f} GiB of its memory are taken; wait, stop "
                "who has them (nvidia-smi), or choose others (CUDA_VISIBLE_DEVICES)"
            )
    return device_memory(torch.device(device, 0), processes)
