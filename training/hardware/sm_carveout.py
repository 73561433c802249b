"""Leaves some multiprocessors of the GPU to communication while matmuls run.

cuBLAS's kernels for Hopper are persistent: one thread block for each multiprocessor. If NCCL holds some of
them, the blocks without one run afterwards, in a second wave, and the matmul can take twice as long
(github.com/pytorch/pytorch/issues/143988). So torch can tell cuBLASLt to use fewer. It reaches what
torch itself computes by cuBLASLt: fp8 matmuls, and some others, depending on its version; not those that
ops/cublaslt.py starts, such as weight gradients in fp8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from common.errors import UserError


@contextlib.contextmanager
def leave_multiprocessors_free(count: int) -> Iterator[None]:
    """Matmuls that are started meanwhile, in any thread, leave so many multiprocessors free; 0: none."""
    if not count:
        yield
        return
    set_carveout = getattr(torch._C, "_set_sm_carveout_experimental", None)
    if set_carveout is None:
        raise UserError(f"sm_carveout={count} needs a setting that torch {torch.__version__} does not have")
    set_carveout(count)
    try:
        yield
    finally:
        set_carveout(None)
