"""Checksums of bits and sums of numbers in one reading (training/optimization/second_look.py).

P programs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ops.triton_kernels.launch import walking_programs

BLOCK, WARPS = tl.constexpr(2048), 4
PER_MULTIPROCESSOR = 8
INTEGERS = {4: tl.int32, 2: tl.int16, 1: tl.uint8}  # bytes of an element -> the integer of its size


@triton.jit(do_not_specialize=["row"])
def _checksum(tensor, checksums, sums, row, n, P, INTEGER: tl.constexpr, BLOCK: tl.constexpr):
    checksum, total = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float32)
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        number = tl.load(tensor + i, mask=i < n, other=0)
        checksum += number.to(INTEGER, bitcast=True).to(tl.int64) * (2 * i + 1)
        total += number.to(tl.float32)
    found = row * P + tl.program_id(0)
    tl.store(checksums + found, tl.sum(checksum, 0))
    tl.store(sums + found, tl.sum(total, 0))


def triton_checksums(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """n tensors -> what second_look.checksum_and_sum() gives for each: int64 (n), fp32 (n)."""
    P = walking_programs(tensors[0].device, PER_MULTIPROCESSOR)
    checksums = tensors[0].new_zeros(len(tensors), P, dtype=torch.int64)
    sums = checksums.new_zeros(checksums.shape, dtype=torch.float32)
    for row, tensor in enumerate(tensors):
        n, size = tensor.numel(), tensor.element_size()
        numbers = tensor.contiguous() if size > 1 else tensor.contiguous().view(torch.uint8)
        if n:
            _checksum[(min(P, triton.cdiv(n, BLOCK.value)),)](
                numbers, checksums, sums, row, n, P, INTEGER=INTEGERS[size], BLOCK=BLOCK, num_warps=WARPS
            )
    return checksums.sum(1), sums.sum(1)
