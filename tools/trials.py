"""A trial of tools.tune: one run of bench.throughput, on GPUs that nobody else uses."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.json_file import read_json
from common.text import one_line
from training.configuration.keys import ROOT, TrainConfig
from training.memory.gpus import DeviceMemory, device_memory
from training.process.memory import GIB

Run = dict[str, Any]  # of bench.throughput: "reason" why it failed, or None and the "measurement"

OWN_GIB = 3.0  # of a GPU: the driver, and the context of the process that asks


def look_at(config: TrainConfig, processes: int) -> DeviceMemory:
    """What a process has. A GPU is looked at in a process of its own, whose context would otherwise stay in
    its memory beside the trials. Raises UserError if there are too few GPUs, or others use them."""
    if config.device == "cpu":
        return device_memory(torch.device("cpu"), processes)
    if processes > torch.cuda.device_count():
        raise UserError(
            f"--nproc={processes} needs as many GPUs, but torch sees {torch.cuda.device_count()}; use fewer, "
            "or --device=cpu. train.py --dry_run=True --gpu=H100 says what fits a GPU that is not here"
        )
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_look_at_gpus, processes).result()


def _look_at_gpus(count: int) -> DeviceMemory:
    for number in range(count):
        free, total = torch.cuda.mem_get_info(number)
        if total - free > OWN_GIB * GIB:
            raise UserError(
                f"GPU {number} is in use: {(total - free) / GIB:.1f} GiB of its memory are taken, and trials "
                "would compete with whoever has them; wait, stop them (nvidia-smi), or choose others "
                "(CUDA_VISIBLE_DEVICES)"
            )
    return device_memory(torch.device("cuda", 0), count)


def run_to_end(command: list[str], log: Path) -> None:
    """Ctrl-C reaches only this process, which then stops the other one and what that has started."""
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait()
        finally:
            process.terminate()  # nothing, if it has ended
            process.wait()


def run_trial(arguments: list[str], folder: Path) -> Run:
    """What bench.throughput measures with these arguments. Raises UserError if it has ended before that."""
    log = folder / "console.log"
    run_to_end([sys.executable, "-m", "bench.throughput", "--keep_cache", *arguments], log)
    try:
        return read_json(folder / "bench" / "table.json")["entries"][0]["runs"][0]
    except (OSError, ValueError, LookupError):
        lines = log.read_text(errors="replace").splitlines() or [""]
        raise UserError(f"bench.throughput: {one_line(lines[-1], 300)}") from None
