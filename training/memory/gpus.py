"""Tells how much memory a process may use: of the device that it has, or of a GPU that a dry run names.

A fraction that limits this process is honored. torch.cuda.set_per_process_memory_fraction() sets it, and so
does PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from common.errors import UserError
from common.text import shown
from training.hardware.capability import Capability, capability, lookup
from training.hardware.peaks import find_gpu
from training.process.memory import GIB, host_bytes

# A CPU's memory is also the system's, the data's and other programs'. The total, not what is free now, so
# that the same machine always chooses the same.
CPU_SHARE = 0.5
CPU_NAME = "the CPU"


@dataclass(frozen=True)
class DeviceMemory:
    """What one process may use, and whose it is."""

    gib: float
    device: str


@dataclass(frozen=True)
class Card:
    """A GPU that a dry run can name."""

    device: str  # torch.cuda.get_device_name(), for training/hardware/peaks.py, which has its capability
    gib: float  # total_memory as torch reports it: less than nvidia-smi's, which counts the driver's part


# Measured: H200 (139.8 GiB of 141 GB). From torch's "total capacity of" in out-of-memory messages that users
# posted, read in November 2026: RTX A6000 47.53 (black-forest-labs/flux2, issue 23), RTX 5090 31.36
# (TrajectoryCrafter, issue 20), 48 GB with ECC 44.43 (MTVCrafter, issue 21), 16 GB Turing 14.76
# (GPT2-Chinese, issue 215). The others follow from the datasheet's size, less 1 to 2 % for the driver, and
# were not read from a device. A run takes the figure of its own device.
CARDS = {
    "B200": Card("NVIDIA B200", 178.0),
    "B300": Card("NVIDIA B300 SXM6 AC", 266.0),
    "GB200": Card("NVIDIA GB200", 184.0),
    "GH200": Card("NVIDIA GH200 480GB", 94.5),
    "H200": Card("NVIDIA H200", 139.8),
    "H200-NVL": Card("NVIDIA H200 NVL", 139.8),
    "H100": Card("NVIDIA H100 80GB HBM3", 79.1),
    "H100-PCIe": Card("NVIDIA H100 PCIe", 79.1),
    "H100-NVL": Card("NVIDIA H100 NVL", 93.0),
    "A100": Card("NVIDIA A100-SXM4-80GB", 79.1),
    "A100-40GB": Card("NVIDIA A100-SXM4-40GB", 39.4),
    "A6000": Card("NVIDIA RTX A6000", 47.5),
    "L40S": Card("NVIDIA L40S", 44.4),
    "RTX-4090": Card("NVIDIA GeForce RTX 4090", 23.6),
    "RTX-5090": Card("NVIDIA GeForce RTX 5090", 31.3),
    "RTX-3090": Card("NVIDIA GeForce RTX 3090", 23.6),
    "T4": Card("Tesla T4", 14.7),
}


def find_card(name: str) -> Card:
    """The GPU of this name: 'H100', 'rtx 4090', '4090' and the device's whole name are the same to it."""
    wanted = _plain(name)
    for short, card in CARDS.items():
        if wanted in (_plain(short), _plain(short).removeprefix("rtx"), _plain(card.device)):
            return card
    raise UserError(f"gpu={shown(name)} is not one of {', '.join(CARDS)}")


def card_memory(card: Card) -> DeviceMemory:
    return DeviceMemory(card.gib, card.device)


def card_capability(card: Card) -> Capability:
    gpu = find_gpu(card.device)
    assert gpu, card
    return lookup(gpu.compute, card.device)


def device_memory(device: torch.device, local_size: int) -> DeviceMemory:
    """What this process may use of its device; processes of one machine share a CPU's memory."""
    if device.type != "cuda":
        return DeviceMemory(host_bytes() / GIB * CPU_SHARE / local_size, CPU_NAME)
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    limit = torch.cuda.get_per_process_memory_fraction(device.index)
    return DeviceMemory(total * limit, capability(device).name)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().removeprefix("nvidia ").removeprefix("geforce "))
