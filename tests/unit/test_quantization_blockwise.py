"""fp8 with scales of blocks of 128: against torchao, by hand, and in a matmul."""

import pytest
import torch
from support.tensors import error, random_bf16

from ops.quantization import blockwise
from ops.quantization.blockwise import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from ops.quantization.formats import E4M3, E5M2


def torchao_kernels():
    pytest.importorskip("triton", reason="torchao's file with this reference imports triton")
    module = "torchao.prototype.blockwise_fp8_training.kernels"
    return pytest.importorskip(module, reason="pip install torchao: the reference for fp8 blocks")


@pytest.mark.parametrize("block", [ALONG_ROWS, SQUARE])
def test_values_and_fp32_scales_are_those_of_torchao(block):
    kernels = torchao_kernels()
    x = random_bf16(256, 384) * torch.linspace(0.01, 30, 384).bfloat16()
    act, weight = kernels.torch_blockwise_scale_act_quant_lhs, kernels.torch_blockwise_scale_weight_quant
    values, inverse_scales = (act if block == ALONG_ROWS else weight)(x, dtype=E4M3)
    ours = blockwise.quantize(x, block, powers_of_two=False)
    assert torch.equal(ours.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(ours.inverse_scales, inverse_scales)


def test_every_bf16_amax_has_the_scale_of_a_division_that_is_rounded_once():
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    exact = torch.tensor(448.0).double() / amax.double()
    largest = torch.finfo(torch.float32).max
    expected = torch.where(exact > largest, largest, exact).float()
    assert torch.equal(blockwise.scale_of(amax, E4M3, powers_of_two=False), expected)
    power = 2.0 ** expected.double().log2().floor()
    rounded = blockwise.scale_of(amax, E4M3, powers_of_two=True).double()
    near = expected.double() / power > 1.9999999  # where log2 of fp64 may be rounded up
    assert torch.equal(rounded[~near], power[~near]) and near.sum() < 1200
    assert (rounded <= expected.double()).all() and (2 * rounded > expected.double()).all()


@pytest.mark.parametrize(
    ("amax", "dtype", "scale"),
    [
        (448.0, E4M3, 1.0),
        (449.0, E4M3, 0.5),
        (1.0, E4M3, 256.0),
        (1.0, E5M2, 32768.0),
        (0.0, E4M3, 1.0),
        (torch.inf, E4M3, 1.0),
        (torch.nan, E4M3, 1.0),
        (1e-40, E4M3, 2.0**127),
    ],
)
def test_scales_are_rounded_down_to_powers_of_two(amax, dtype, scale):
    assert blockwise.scale_of(torch.tensor([amax]), dtype, powers_of_two=True).tolist() == [scale]


@pytest.mark.parametrize(
    ("block", "shape"), [(ALONG_ROWS, (256, 3)), (ALONG_COLUMNS, (2, 384)), (SQUARE, (2, 3))]
)
def test_a_scale_belongs_to_its_block_alone(block, shape):
    x = random_bf16(256, 384)
    plain = blockwise.quantize(x, block)
    x[130, 200] = 1000
    changed = blockwise.quantize(x, block)
    assert plain.inverse_scales.shape == shape
    assert (plain.inverse_scales != changed.inverse_scales).nonzero().tolist() == [
        [130 // block[0], 200 // block[1]]
    ]


def test_columns_are_the_rows_of_the_transpose():
    x = random_bf16(256, 384)
    by_columns, by_rows = blockwise.quantize(x, ALONG_COLUMNS), blockwise.quantize(x.t().contiguous())
    assert torch.equal(by_columns.values.float(), by_rows.values.float().t())
    assert torch.equal(by_columns.inverse_scales, by_rows.inverse_scales.t())


def test_bf16_holds_the_values_exactly():
    for std in (1e-20, 1.0, 1e20):
        quantized = blockwise.quantize(random_bf16(128, 256, std=std))
        exact = blockwise.dequantize(quantized, torch.float64)
        assert torch.equal(blockwise.dequantize(quantized).double(), exact)


def test_nan_stays_and_inf_saturates():
    x = random_bf16(2, 128)
    x[0, 3], x[1, 3] = torch.nan, -torch.inf
    values = blockwise.dequantize(blockwise.quantize(x))
    assert values[0].isnan().tolist() == [column == 3 for column in range(128)]
    assert values[1, 3] == -448


@pytest.mark.parametrize("block", [ALONG_ROWS, SQUARE])
def test_the_error_on_normal_numbers_is_below_3_percent(block):
    x = random_bf16(512, 1024)
    assert error(blockwise.dequantize(blockwise.quantize(x, block)), x) < 0.03


def test_a_matmul_that_scales_each_block_is_one_of_dequantized_matrices():
    """What a GPU's kernel computes: fp8 products of 128 columns, times both scales, added in fp32."""
    x, weight = random_bf16(64, 384), random_bf16(128, 384, std=0.02)
    x8, w8 = blockwise.quantize(x), blockwise.quantize(weight, SQUARE)
    total = torch.zeros(64, 128)
    for k in range(3):
        columns = slice(128 * k, 128 * (k + 1))
        products = x8.values[:, columns].float() @ w8.values[:, columns].float().t()
        total += products * x8.inverse_scales[:, k : k + 1] * w8.inverse_scales[0, k]
    assert error(blockwise.dequantize(x8).float() @ blockwise.dequantize(w8).float().t(), total) < 1e-6
    assert error(total, x.float() @ weight.float().t()) < 0.05


@pytest.mark.parametrize(
    ("shape", "block", "message"),
    [
        ((4, 192), ALONG_ROWS, "4 x 192 cannot be divided into blocks of 1 x 128"),
        ((192, 128), SQUARE, "its height must be a multiple of 128"),
        ((128, 128), (1, 32), "fp8_blockwise has no blocks of 1 x 32"),
    ],
)
def test_a_matrix_that_blocks_do_not_divide_is_an_error(shape, block, message):
    with pytest.raises(ValueError, match=message):
        blockwise.quantize(torch.zeros(shape), block)
