"""The kernels of block-scaled operands against their plain forms, for a GPU or for Triton's interpreter."""

import torch
from support import triton_interpreter
from support.emulated_operands import KEY, matrices

from ops.triton_kernels import philox
from recipes.block_scaled import block_forms
from recipes.kernels import block_scaled, nvfp4
from recipes.nvfp4_linear import nvfp4_amaxes

FIELDS = ("rows", "columns", "scales of rows", "scales of columns")


def assert_same_bytes(ours, plain, name):
    """An E4M3 nan may have either sign."""
    for field, found, expected in zip(FIELDS, ours, plain, strict=True):
        if expected.dtype == torch.float8_e4m3fn:
            found, expected = (torch.where(x.isnan(), 1, x.view(torch.uint8)) for x in (found, expected))
        found = found.cpu()
        assert torch.equal(found, expected), f"{field}, {name}: {(found != expected).sum()} differ"


def empty_like(forms, device):
    """Bytes that no kernel writes."""
    return tuple(torch.full(one.shape, 0xA5, dtype=torch.uint8).view(one.dtype).to(device) for one in forms)


def assert_kernels_equal_plain_forms(shape, device, names=None):
    """Every kernel, with every matrix. With an amax of nan, the global factor is nan and the codes may be
    anything."""
    made = matrices(*shape)
    for name in names or made:
        x = made[name]
        amaxes = nvfp4_amaxes(x)
        cases = {"mxfp8": (None, None)} if shape[0] % 32 == shape[1] % 32 == 0 else {}
        if not amaxes.isnan().any():
            cases |= {"nvfp4": (amaxes, None), "stochastic": (amaxes, KEY), "weight": (amaxes[:1], None)}
        for kind, arguments in cases.items():
            plain = block_forms(x, *arguments)
            there = [one if one is None else one.to(device) for one in (x, *arguments)]
            ours = block_scaled.triton_block_forms(*there, empty_like(plain, device))
            assert_same_bytes(ours, plain, f"{kind}, {name}")


if __name__ == "__main__":  # with TRITON_INTERPRET=1, which counts when triton is imported
    triton_interpreter.prepare(block_scaled, nvfp4, philox)
    assert_kernels_equal_plain_forms((32, 96), "cpu")
    assert_kernels_equal_plain_forms((144, 80), "cpu", ["normal", "of many sizes"])
    print("equal")
