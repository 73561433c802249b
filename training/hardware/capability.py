"""Tells what a device can do, by its CUDA compute capability: attention kernels, bf16 and fp8 matmuls.

A new GPU is a new row of the table, and tests replace one function. What recipes/ needs beyond it is asked
there.
Trap: a larger number does not mean more. 12.0 (RTX 5090) is another design than 10.0 (B200), not a later one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

CUDNN, TORCH = "cuDNN", "torch"  # inside attention backend sdpa: cuDNN, or the kernel that torch chooses
FA2, FA3, FA4 = "flash_attn_2", "flash_attn_3", "flash_attn_4"


@dataclass(frozen=True)
class Capability:
    """One device: its row of the table, and which device it is."""

    sdpa: tuple[str, ...]  # kernels to try inside attention backend sdpa, best first
    flash_attn: tuple[str, ...]  # attention backends whose package has kernels for it
    bf16: bool
    fp8: bool  # matmuls with one scale per tensor
    compute: tuple[int, int] | None = None  # (major, minor); None without CUDA
    name: str = "the CPU"


# Only the row 9.0 was measured, on an H200 (LOG.md). The others are from documents, read in November 2026:
#   GPUs               developer.nvidia.com/cuda-gpus
#   sdpa               torch, too, prefers cuDNN on 9.x and 10.x (sdp_utils.cpp, check_prefer_cudnn_attention)
#   flash_attn         3: its README (H100, H800). 2: setup.py of 2.8.3 builds for 8.0, 9.0, 10.0 and 12.0; a
#                      build runs on later minor numbers. 4: interface.py of 4.0.0b36, whose backward has 9.x,
#                      10.x, 11.x and 12.x. The probe in attention_kernels.py decides
#   fp8                torch._scaled_mm accepts 8.9, and 9.0 or above; before, bf16 holds the fp8 numbers
# The layout of fp8 operands needs no column. cuBLASLt requires row-major times column-major ("TN") on 8.9,
# 9.0 and 12.x and takes any on 10.x (manual, cublasLtMatmul), but torch 2.13 requires TN everywhere.
AMPERE = Capability((TORCH,), (FA2,), bf16=True, fp8=False)
ADA = Capability((TORCH,), (FA2,), bf16=True, fp8=True)
RTX = replace(ADA, flash_attn=(FA4, FA2))
BLACKWELL = Capability((CUDNN, TORCH), (FA4, FA2), bf16=True, fp8=True)
TABLE = {
    (8, 0): AMPERE,  # A100
    (8, 6): AMPERE,  # A6000, RTX 30
    (8, 9): ADA,  # L40S, RTX 4090
    (9, 0): Capability((CUDNN, TORCH), (FA4, FA3, FA2), bf16=True, fp8=True),  # H100, H200
    (10, 0): BLACKWELL,  # B200, GB200
    (10, 3): BLACKWELL,  # B300, GB300
    (12, 0): RTX,  # RTX 5090, RTX PRO Blackwell
    (12, 1): RTX,  # GB10
}
OLDER = Capability((TORCH,), (), bf16=False, fp8=False)  # before Ampere: V100, T4
NEWER = ADA  # a major number that is not in the table: what torch promises, and FA2 if its probe succeeds
CPU = Capability((TORCH,), (), bf16=True, fp8=False)


def dotted(compute: tuple[int, int] | None) -> str:
    return "none" if compute is None else "{}.{}".format(*compute)


def lookup(compute: tuple[int, int], name: str) -> Capability:
    """The row of this capability, else the last row before it with the same major number."""
    known = [row for row in TABLE if row[0] == compute[0] and row <= compute]
    other = OLDER if compute < min(TABLE) else NEWER
    return replace(TABLE[max(known)] if known else other, compute=compute, name=name)


def capability(device: torch.device | str) -> Capability:
    """What this device can do. Tests replace this function."""
    device = torch.device(device)
    if device.type != "cuda":
        return CPU
    gpu = torch.cuda.get_device_properties(device)
    return lookup((gpu.major, gpu.minor), gpu.name)
