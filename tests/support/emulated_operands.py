"""The emulated operands' kernels against their plain forms, for a GPU or for Triton's interpreter."""

import torch
from support import triton_interpreter
from support.tensors import random

from ops.quantization.random_bits import random_key
from ops.triton_kernels import philox
from recipes.kernels import mxfp8, nvfp4
from recipes.mxfp8 import mxfp8_operand
from recipes.nvfp4_linear import nvfp4_amaxes, nvfp4_operand, nvfp4_weight

KEY = random_key(2**40 + 7, iteration=2**31 + 5, micro_step=3, tensor=2**30 - 1)
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


def matrices(M, N):
    """What a run has, and what is hard."""
    normal = random(M, N)
    sizes = 10.0 ** torch.linspace(-42, 38, M * N).view(M, N)
    zeros = normal.clone()
    zeros[:32], zeros[:, :32] = 0, 0
    with_inf, with_nan = normal.clone(), normal.clone()
    with_inf[1, 3], with_inf[-1, -1] = torch.inf, -torch.inf
    with_nan[2, 5] = torch.nan
    made = {"normal": normal, "of many sizes": normal * sizes, "by columns": (normal.t() * sizes.t()).t()}
    made |= {"blocks of zeros": zeros, "zero": torch.zeros(M, N), "minus zero": -torch.zeros(M, N)}
    made |= {"inf": with_inf, "nan": with_nan, "small": normal * 1e-36, "subnormal": normal * 1e-39}
    made |= {"large": normal * 5e37, "ties": (normal * 8).round() / 8, "gradient": normal * 1e-6}
    return {name: matrix.bfloat16() for name, matrix in made.items()}


def assert_same_bits(ours, plain, name):
    """nan has many bit patterns, of which each device takes its own."""
    ours = ours.cpu()
    assert torch.equal(ours.isnan(), plain.isnan()), name
    ours, plain = (torch.where(x.isnan(), 0, x.view(INTEGERS[x.dtype])) for x in (ours, plain))
    assert torch.equal(ours, plain), f"{name}: {(ours != plain).sum()} of {ours.numel()} differ"


def assert_kernels_equal_plain_forms(shape, device):
    """Every kernel, with every matrix."""
    key = KEY.to(device)
    for name, x in matrices(*shape).items():
        amaxes = nvfp4_amaxes(x)
        there, amaxes_there = x.to(device), amaxes.to(device)
        known = (there, amaxes_there)
        assert_same_bits(nvfp4.triton_nvfp4_amaxes(there), amaxes, f"amaxes of {name}")
        pairs = [
            (mxfp8.triton_mxfp8(there), mxfp8_operand(x), "mxfp8"),
            (nvfp4.triton_nvfp4(*known, None), nvfp4_operand(x, amaxes), "nvfp4"),
            (nvfp4.triton_nvfp4(*known, key), nvfp4_operand(x, amaxes, KEY), "stochastic"),
        ]
        for ours, plain, kind in pairs:
            assert_same_bits(ours[0], plain[0], f"{kind} along rows, {name}")
            assert_same_bits(ours[1], plain[1], f"{kind} along columns, {name}")
        square = nvfp4.triton_nvfp4_square(there, amaxes_there[0])
        assert_same_bits(square, nvfp4_weight(x, amaxes[0]), f"weight, {name}")


if __name__ == "__main__":  # with TRITON_INTERPRET=1, which counts when triton is imported
    triton_interpreter.prepare(mxfp8, nvfp4, philox)
    # the interpreter needs 0.2 s for a program: 96 columns are two tiles
    mxfp8.TILE_N, nvfp4.WARPS, nvfp4.THREADS, nvfp4.COLUMN_WORDS = 64, 1, 8, 2
    assert_kernels_equal_plain_forms((32, 96), "cpu")
    print("equal")
