"""The kernels of fp8 in blocks against their plain forms, for a GPU or for Triton's interpreter."""

import torch
from support import triton_interpreter
from support.emulated_operands import assert_same_bits, matrices

from ops import block_float8
from ops.triton_kernels import block_float8 as kernels

NAMES = block_float8.BlockFloat8._fields


def every_amax():
    """(2^15, 128): each number of bf16 that is not negative is the amax of a row."""
    amaxes = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.minimum(torch.full((2**15, 128), 2.0**-130).bfloat16(), amaxes[:, None])
    x[:, 5] = -amaxes
    return x


def assert_block_kernels_equal_plain_forms(shape, device, fp8=True):
    """Every kernel, with every matrix."""
    for name, x in matrices(*shape).items():
        assert_kernels_equal_plain_forms(name, x, device, fp8)


def assert_kernels_equal_plain_forms(name, x, device, fp8=True):
    there = x.to(device)
    ours, plain = kernels.triton_block_emulated_operand(there), block_float8.block_emulated_operand(x)
    assert_same_bits(ours[0], plain[0], f"emulated along rows, {name}")
    assert_same_bits(ours[1], plain[1], f"emulated along columns, {name}")
    weight = block_float8.block_emulated_weight(x)
    assert_same_bits(kernels.triton_block_emulated_weight(there), weight, f"emulated weight, {name}")
    if fp8:
        assert_same_fields(operand(there), block_float8.block_operand(x), f"operand, {name}")
        assert_same_fields(written_weight(there), block_float8.block_weight(x), f"weight, {name}")


def assert_same_fields(ours, plain, name):
    for field, a, b in zip(NAMES, ours, plain, strict=True):
        assert (a.shape, a.stride()) == (b.shape, b.stride()), f"{field} of {name}"
        if a.dtype == torch.float8_e4m3fn:  # bf16 holds its numbers
            a, b = a.bfloat16(), b.bfloat16()
        assert_same_bits(a, b, f"{field} of {name}")


def operand(x):
    """block_operand by its kernel, wherever x is."""
    scales, transposed_scales = block_float8._empty_scales(x)
    values, transposed = kernels.triton_block_operand(x, scales, transposed_scales)
    return values, scales.t(), transposed, transposed_scales.t()


def written_weight(w):
    """block_weight by its kernel, wherever w is."""
    values, scales, transposed, transposed_scales = written = block_float8.empty_block_weight(w)
    kernels.triton_block_weight(w, values, scales.t(), transposed, transposed_scales.t())
    return written


if __name__ == "__main__":  # with TRITON_INTERPRET=1, which counts when triton is imported
    triton_interpreter.prepare(kernels)
    assert_block_kernels_equal_plain_forms((128, 256), "cpu")
    assert_kernels_equal_plain_forms("normal", matrices(256, 384)["normal"], "cpu")
    x = every_amax()
    assert_same_fields(operand(x), block_float8.block_operand(x), "every amax")
    print("equal")
