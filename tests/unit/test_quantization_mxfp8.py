"""MXFP8 against torchao: codes, exponents, and the three matmuls of a Linear."""

import pytest
import torch
from support.tensors import random, random_bf16

from recipes.formats import mxfp8
from recipes.formats.mxfp8 import ALONG_COLUMNS, ALONG_ROWS


def torchao_to_mx(x):
    """(codes, exponents) of torchao, blocks of 32 along the last dimension, scales rounded up."""
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="pip install torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    exponents, values = module.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return values.view(torch.uint8), exponents.view(torch.uint8)


def assert_equals_torchao(x):
    ours = mxfp8.quantize(x)
    values, exponents = torchao_to_mx(x)
    assert torch.equal(ours.exponents, exponents)
    assert torch.equal(ours.values.view(torch.uint8), values)


def every_amax():
    """A block for each positive bf16 number that is its amax."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = random_bf16(len(amax), 32).float()
    x = x / x.abs().amax(1, keepdim=True) * amax.float()[:, None]
    x[:, 7] = -amax.float()
    return x.bfloat16()


# --- codes and exponents ---


@pytest.mark.parametrize("std", [1e-30, 0.02, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_and_exponents_are_those_of_torchao(std, dtype):
    assert_equals_torchao(random(256, 512, dtype=dtype, std=std))


def test_codes_and_exponents_are_those_of_torchao_for_every_bf16_amax():
    """Also where the exponent's code is 0 and for subnormal numbers."""
    x = every_amax()
    assert len(x) == 32639
    assert_equals_torchao(x)


def test_zero_nan_and_inf_are_those_of_torchao():
    x = random_bf16(5, 32)
    x[0] = 0
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3, 3], x[3, 4] = -torch.inf, torch.nan
    assert_equals_torchao(x)
    assert mxfp8.quantize(x).exponents[:4, 0].tolist() == [0, 255, 254, 255]


def test_nan_and_inf_do_not_hide():
    x = random_bf16(3, 64)
    x[0, 3], x[1, 3] = torch.nan, -torch.inf
    values = mxfp8.dequantize(mxfp8.quantize(x))
    assert values[0, :32].isnan().all()
    assert values[1, 3] == -torch.inf
    assert values[:, 32:].isfinite().all() and values[2].isfinite().all()


def test_columns_are_the_rows_of_the_transpose():
    x = random_bf16(96, 80)
    by_columns, by_rows = mxfp8.quantize(x, ALONG_COLUMNS), mxfp8.quantize(x.t()[:, :96].contiguous())
    assert by_columns.exponents.shape == (3, 80)
    assert torch.equal(by_columns.exponents, by_rows.exponents.t())
    assert torch.equal(by_columns.values.float(), by_rows.values.float().t())


def test_the_smallest_scale_that_does_not_saturate_is_taken():
    quantized = mxfp8.quantize(random_bf16(64, 64))
    largest = quantized.values.float().abs().view(64, 2, 32).amax(-1)
    assert (largest <= 448).all() and (largest > 220).all()


# --- values ---


def test_bf16_holds_the_values_exactly():
    x = every_amax()
    x = x[x.float().abs().amax(1) < 2.0**127]  # the largest numbers are rounded up to 2^128: inf
    quantized = mxfp8.quantize(x)
    exact = quantized.values.double() * 2.0 ** (quantized.exponents.double() - 127)
    assert torch.equal(mxfp8.dequantize(quantized, torch.float32).double(), exact)
    normal = exact.abs() >= 2.0**-126
    assert torch.equal(mxfp8.dequantize(quantized).double()[normal], exact[normal])


# --- errors ---


@pytest.mark.parametrize(
    ("shape", "block", "message"),
    [
        ((32, 48), ALONG_ROWS, "32 x 48 cannot be divided into blocks of 1 x 32"),
        ((48, 32), ALONG_COLUMNS, "48 x 32 cannot be divided into blocks of 32 x 1"),
        ((0, 32), ALONG_ROWS, "0 x 32 cannot be divided"),
        ((2, 32, 32), ALONG_ROWS, "2 x 32 x 32 cannot be divided"),
    ],
)
def test_a_matrix_that_blocks_do_not_divide_is_an_error(shape, block, message):
    with pytest.raises(ValueError, match=message):
        mxfp8.quantize(torch.zeros(shape, dtype=torch.bfloat16), block)
