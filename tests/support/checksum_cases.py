"""The kernel of checksums against its plain form, for a GPU or for Triton's interpreter."""

import torch
from support import triton_interpreter
from support.tensors import random

from ops.triton_kernels import checksum
from training.optimization.second_look import checksum_and_sum

DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8
SHAPES = (), (1,), (0, 3), (37, 11), (5, 1000), (64, 130)


def assert_the_kernel_equals_its_plain_form(shapes=SHAPES, device="cpu"):
    """Also of tensors that begin anywhere in a larger one, and of transposed ones."""
    tensors = []
    for shape in shapes:
        numbers = 3 * random(*shape, 2)[..., 1]
        tensors += [numbers.to(dtype) if dtype != torch.uint8 else numbers.byte() for dtype in DTYPES]
        tensors += [numbers.flatten()[1:], numbers.mT if numbers.dim() > 1 else numbers]
    checksums, sums = checksum.triton_checksums([tensor.to(device) for tensor in tensors])
    for tensor, found, total in zip(tensors, checksums.tolist(), sums.cpu(), strict=True):
        wanted, plain_total = checksum_and_sum(tensor)
        assert found == wanted, (tensor.shape, tensor.dtype)
        torch.testing.assert_close(total, plain_total, rtol=1e-4, atol=0.1)


if __name__ == "__main__":  # with TRITON_INTERPRET=1, which counts when triton is imported
    triton_interpreter.prepare()
    checksum.BLOCK = triton_interpreter.tl.constexpr(64)  # so that programs walk over several blocks
    assert_the_kernel_equals_its_plain_form()
    print("equal")
