"""Describes the machine and its software for the run record."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import numpy
import torch

from training.hardware.capability import capability, dotted
from training.process.memory import GIB


def describe_hardware(device) -> dict:
    """The record's facts about the machine. On a CPU, gpu_name is the CPU's name, other GPU facts are None.

    gpu_memory_gb keeps its name in the record, but is in GiB (2**30 bytes): 139.8 for one H200 of 141 GB.
    """
    device = torch.device(device)
    cpu = _search(r"(?<=model name\t: ).+", "/proc/cpuinfo") or platform.processor() or platform.machine()
    keys = ("gpu_name", "gpu_memory_gb", "compute_capability", "driver", "cuda", "cudnn", "nccl")
    facts = dict.fromkeys(keys) | {"gpu_name": cpu}
    if device.type == "cuda":
        facts["gpu_name"] = torch.cuda.get_device_name(device)
        facts["gpu_memory_gb"] = round(torch.cuda.get_device_properties(device).total_memory / GIB, 2)
        facts["compute_capability"] = dotted(capability(device).compute)
        facts["driver"] = _search(r"\b\d{3}\.\d+(?:\.\d+)?\b", "/proc/driver/nvidia/version")  # 580.126.20
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(str(number) for number in torch.cuda.nccl.version())
    versions = {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}
    return facts | versions


def _search(pattern: str, path: str) -> str | None:
    """The first match in a file that not every system has."""
    found = re.search(pattern, Path(path).read_text()) if Path(path).exists() else None
    return found and found[0]
