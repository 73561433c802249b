"""Says which build of torch fits: its version, and the NVIDIA driver that its CUDA needs.

Trap: torch.cuda.is_available() is False with a driver that is too old, as on a machine without a GPU.
"""

from __future__ import annotations

import re

import torch

SUPPORTED = (2, 11), (2, 13)  # the first and the last version of torch that the code was made for
# Least drivers by CUDA's major version: docs.nvidia.com/deploy/cuda-compatibility, 'Minor Version'.
LEAST_DRIVER = {12: 525, 13: 580}
# The newest build for CUDA 12 with kernels for Blackwell: 2.12 dropped CUDA 12.8 (pytorch issue 178665).
OLDER_CUDA = "pip install torch==2.11.0 --index-url https://download.pytorch.org/whl/cu128"


def version_warnings(version: str = torch.__version__) -> list[str]:
    """One line if this torch is older or newer than those that are supported."""
    first, last = SUPPORTED
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and first <= (int(found[1]), int(found[2])) <= last:
        return []
    supported = "torch {}.{} to {}.{}".format(*first, *last)
    return [f"torch {version} was not tried with this version of nanoMFU, which supports {supported}"]


def no_gpu_reason() -> str:
    """Why torch finds no CUDA GPU, and what to type."""
    try:
        torch.cuda.init()
        said = ""
    except (AssertionError, RuntimeError) as error:  # AssertionError: a build without CUDA
        said = str(error)
    found = re.search(r"driver on your system is too old \(found version (\d+)", said)  # 12060: CUDA 12.6
    if not found:
        return (
            f"torch {torch.__version__} finds no CUDA GPU; "
            "use --device=cpu, or install a CUDA build of torch and check nvidia-smi"
        )
    major, minor = int(found[1]) // 1000, int(found[1]) % 1000 // 10
    built_for = 12 if (torch.version.cuda or "").startswith("12") else 13
    other = f", or take a build for CUDA 12: {OLDER_CUDA}" if major == 12 < built_for else ""
    return (
        f"the NVIDIA driver, for CUDA {major}.{minor}, is too old for torch {torch.__version__}; update it "
        f"to {LEAST_DRIVER[built_for]} or newer{other}"
    )
