"""Decides how many programs a kernel starts if each of them walks over many rows: some a multiprocessor.

Such a kernel sums over all rows (the gradient of a norm's weight): each program adds up its own rows, then
sum_parts.py adds the programs' sums. A fixed number fits one GPU only: 528 programs are 4 on each
multiprocessor of an H200 (132), but on a B200 (148) some would have 4 and some 3, and all would wait for
those with 4.

Trap: the number of programs is the order of the additions, and so the last bits of the gradient. It may
depend on the device and on shapes, and on nothing that differs from one start to the next: no timing, no free
memory. So a resume is bit-exact on a GPU of the same kind; on another kind it is as close as fp32 sums are.
"""

from __future__ import annotations

import torch

# of a CPU, where kernels run in Triton's interpreter: more than one sum to add
INTERPRETER_MULTIPROCESSORS = 2


def multiprocessors(device: torch.device) -> int:
    """Tests replace torch.cuda.get_device_properties, so that this is another GPU."""
    if device.type != "cuda":
        return INTERPRETER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def walking_programs(device: torch.device, per_multiprocessor: int) -> int:
    """How many programs share the rows of a tensor on this device. Start no more than there are rows."""
    return multiprocessors(device) * per_multiprocessor
