"""The kernels of delayed scaling against their plain forms, for a GPU or for Triton's interpreter."""

import torch
from support import triton_interpreter
from support.emulated_operands import assert_same_bits, matrices
from support.tensors import random_bf16

from ops import float8
from ops.triton_kernels import swiglu
from recipes.delayed_casts import plain_delayed_quantize
from recipes.kernels import delayed_float8 as kernels
from recipes.kernels import delayed_swiglu

SCALES = 0.0, 37.5  # without a history, and with one
AMAXES = 0.0, 1e30, torch.nan


def assert_delayed_kernels_equal_plain_forms(shape, device):
    """Every cast kernel, with every matrix and state."""
    for name, x in matrices(*shape).items():
        known = x.abs().amax(-1)
        for scale in SCALES:
            for dtype in (float8.FORWARD, float8.GRADIENT):
                for amax in (None, known):
                    assert_same_cast(
                        f"{name}, {scale}, {dtype}, {amax is None}", x, scale, dtype, amax, device
                    )
    for before in AMAXES:
        assert_same_cast(f"after {before}", random_bf16(*shape), 2.0, float8.FORWARD, None, device, before)


def assert_same_cast(name, x, scale, dtype, known, device, amax=0.0):
    plain_amax, ours_amax = torch.tensor(amax), torch.tensor([9.0, amax], device=device)[1]
    plain = plain_delayed_quantize(x, torch.tensor(scale), plain_amax, dtype, known)
    there = known if known is None else known.to(device)
    state = torch.tensor([scale, 9.0], device=device)[0], ours_amax
    ours = kernels.triton_delayed_quantize(x.to(device), *state, dtype, there)
    assert_same((*ours, ours_amax), (*plain, plain_amax), name)


def assert_swiglu_kernels_equal_a_cast(shape, device):
    """The backward in fp8 has the bits of a cast of the one in bf16."""
    M, F = shape
    x, dh = random_bf16(M, 2 * F, device=device), random_bf16(M, F, device=device)
    large_up, with_inf, with_nan = x.clone(), dh.clone(), dh.clone()
    large_up[:, 1::2] *= 8  # gate's gradient has the largest magnitude
    with_inf[M // 2, F // 3], with_nan[-1, -1] = torch.inf, torch.nan
    pairs = {"normal": (x, dh), "up": (large_up, dh), "inf": (x, with_inf), "nan": (x, with_nan)}
    for name, (gate_up, d) in pairs.items():
        dx = swiglu.triton_swiglu_backward(gate_up, d, 64)
        for scale in SCALES:
            ours_amax, plain_amax = (torch.zeros((), device=device) for _ in "ab")
            state, dtype = torch.tensor(scale, device=device), float8.GRADIENT
            ours = delayed_swiglu.triton_delayed_swiglu_backward(gate_up, d, state, ours_amax, dtype, 64)
            plain = plain_delayed_quantize(dx, state, plain_amax, dtype, None)
            assert_same((*ours, ours_amax), (*plain, plain_amax), f"SwiGLU, {name}, {scale}")


def assert_same(ours, plain, name):
    for part, a, b in zip(("values", "transposed", "inverse", "amax"), ours, plain, strict=True):
        if a.itemsize == 1:  # bf16 holds the numbers of fp8
            a, b = a.bfloat16(), b.bfloat16()
        assert_same_bits(a, b.cpu(), f"{part} of {name}")


if __name__ == "__main__":  # with TRITON_INTERPRET=1, which counts when triton is imported
    triton_interpreter.prepare(kernels, swiglu, delayed_swiglu)
    kernels.WALKED = 1024
    assert_delayed_kernels_equal_plain_forms((66, 96), "cpu")
    assert_delayed_kernels_equal_plain_forms((33, 48), "cpu")
    assert_swiglu_kernels_equal_a_cast((34, 96), "cpu")
    print("equal")
