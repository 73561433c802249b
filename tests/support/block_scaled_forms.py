"""The kernels of block-scaled operands against their plain forms, for a GPU or for Triton's interpreter."""

import torch
from support import triton_interpreter
from support.emulated_operands import KEY, matrices

from ops.recipes.block_scaled import mxfp8_forms, nvfp4_forms, nvfp4_weight_forms
from ops.recipes.nvfp4 import nvfp4_amaxes
from ops.triton_kernels import block_scaled, nvfp4, philox

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
        x, key = made[name], KEY.to(device)
        amaxes = nvfp4_amaxes(x)
        there, known = x.to(device), amaxes.to(device)
        if shape[0] % 32 == shape[1] % 32 == 0:
            plain = mxfp8_forms(x)
            ours = block_scaled.triton_mxfp8_forms(there, empty_like(plain, device))
            assert_same_bytes(ours, plain, f"mxfp8, {name}")
        if amaxes.isnan().any():
            continue
        for kind, plain_key, its_key in (("nvfp4", None, None), ("stochastic", KEY, key)):
            plain = nvfp4_forms(x, amaxes, plain_key)
            ours = block_scaled.triton_nvfp4_forms(there, known, its_key, empty_like(plain, device))
            assert_same_bytes(ours, plain, f"{kind}, {name}")
        plain = nvfp4_weight_forms(x, amaxes[0])
        ours = block_scaled.triton_nvfp4_weight_forms(there, known[0], empty_like(plain, device))
        assert_same_bytes(ours, plain, f"weight, {name}")


if __name__ == "__main__":  # with TRITON_INTERPRET=1, which counts when triton is imported
    triton_interpreter.prepare(block_scaled, nvfp4, philox)
    assert_kernels_equal_plain_forms((32, 96), "cpu")
    assert_kernels_equal_plain_forms((144, 80), "cpu", ["normal", "of many sizes"])
    print("equal")
