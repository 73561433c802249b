"""The GPU's clock as a tensor, which a captured graph reads, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def _timestamp(out):
    tl.store(out, globaltimer())


def timestamp(device: torch.device) -> torch.Tensor:
    """Nanoseconds, int64 (), once all work before it on this stream is done. It counts in steps of about a
    microsecond."""
    out = torch.empty((), dtype=torch.int64, device=device)
    _timestamp[(1,)](out, num_warps=1)
    return out
