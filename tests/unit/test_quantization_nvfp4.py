"""NVFP4 against TransformerEngine's Python reference: codes, scales, amax, Hadamard transform, matmuls."""

import pytest
import torch
from support.te_reference import nvfp4_reference
from support.tensors import error, random, random_bf16

from recipes.formats import nvfp4
from recipes.formats.hadamard import random_hadamard
from recipes.formats.numbers import e2m1_values, round_to_e2m1_stochastically
from recipes.formats.nvfp4 import ALONG_COLUMNS, ALONG_ROWS, SQUARE


def reference(tile, hadamard=False):
    return nvfp4_reference().NVFP4QuantizerRef(dtype=None, quant_tile_shape=tile, with_rht=hadamard)


def assert_equals_reference(ours, codes, scales, amax, transposed=False):
    """The reference keeps one row of scales for each row of x, also for blocks of 16 x 16."""
    our_codes = ours.codes.t().contiguous() if transposed else ours.codes
    our_scales = (ours.scales.t() if transposed else ours.scales).contiguous().view(torch.uint8)
    if ours.block == SQUARE:
        our_scales = our_scales.repeat_interleave(16, 0)
    # It gives -0 the code of 0.
    our_codes = torch.where(our_codes == 8, 0, our_codes)
    assert torch.equal(our_codes[..., ::2] | (our_codes[..., 1::2] << 4), without_minus_zero(codes))
    assert torch.equal(our_scales, scales.contiguous().view(torch.uint8))
    assert torch.equal(ours.amax, amax.squeeze())


def without_minus_zero(packed):
    low, high = packed & 15, packed >> 4
    return torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)


def tensors():
    """What a run has, and what is hard: rows of zeros, outliers, very small, very large, all 0."""
    normal = random(128, 256)
    outliers = normal * (1 + 200 * (random(256, 128).t() > 3))
    zeros = normal.clone()
    zeros[::3] = 0
    mixed = normal * 10.0 ** torch.linspace(-12, 4, 128)[:, None]
    made = {"normal": normal, "outliers": outliers, "rows of zeros": zeros, "of many sizes": mixed}
    made |= {"small": normal * 1e-30, "subnormal": normal * 1e-39, "large": normal * 1e30}
    return made | {"zero": torch.zeros(128, 256)}


CASES = [(name, dtype) for name in tensors() for dtype in (torch.bfloat16, torch.float32)]

# --- codes, scales and amax ---


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_blocks_of_16_are_those_of_the_reference_along_rows_and_columns(name, dtype):
    x = tensors()[name].to(dtype)
    codes, scales, codes_t, scales_t, amax, amax_t = reference((1, 16))._quantize(x)
    assert_equals_reference(nvfp4.quantize(x, ALONG_ROWS), codes, scales, amax)
    assert_equals_reference(nvfp4.quantize(x, ALONG_COLUMNS), codes_t, scales_t, amax_t, transposed=True)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_square_blocks_are_those_of_the_reference(name, dtype):
    x = tensors()[name].to(dtype)
    codes, scales, *_, amax, _ = reference((16, 16))._quantize(x)
    assert_equals_reference(nvfp4.quantize(x, SQUARE), codes, scales, amax)


@pytest.mark.parametrize(
    "name", [name for name in tensors() if name != "subnormal"]
)  # which bf16 matmuls of a CPU make 0
def test_the_transformed_columns_are_those_of_the_reference(name):
    x = tensors()[name].bfloat16()
    _, _, codes, scales, _, amax = reference((1, 16), hadamard=True)._quantize(x)
    ours = nvfp4.quantize(random_hadamard(x, dim=0), ALONG_COLUMNS)
    assert_equals_reference(ours, codes, scales, amax, transposed=True)


@pytest.mark.parametrize("tile", [(1, 16), (16, 16)])
def test_a_matrix_with_an_inf_is_that_of_the_reference(tile):
    x = random_bf16(64, 64)
    x[5, 7] = torch.inf
    codes, scales, *_, amax, _ = reference(tile)._quantize(x)
    ours = nvfp4.quantize(x, tile)
    assert_equals_reference(ours, codes, scales, amax)
    assert nvfp4.dequantize(ours)[5, 7] == torch.inf


def test_nan_does_not_hide():
    x = random_bf16(32, 32)
    x[1, 1] = torch.nan
    assert nvfp4.dequantize(nvfp4.quantize(x)).isnan().all()


def test_an_amax_that_is_known_is_used():
    x = random_bf16(32, 32)
    ours, known = nvfp4.quantize(x), nvfp4.quantize(x, amax=x.abs().amax().view(1, 1))
    assert torch.equal(ours.codes, known.codes) and torch.equal(ours.amax, known.amax)
    assert not torch.equal(ours.scales.float(), nvfp4.quantize(x, amax=x.abs().amax() * 3).scales.float())


def test_a_weight_has_the_same_values_in_forward_and_backward():
    weight = random_bf16(64, 96)
    forward, backward = nvfp4.quantize(weight, SQUARE), nvfp4.quantize(weight.t().contiguous(), SQUARE)
    assert torch.equal(nvfp4.dequantize(forward), nvfp4.dequantize(backward).t())


# --- values ---


@pytest.mark.parametrize("block", [ALONG_ROWS, ALONG_COLUMNS, SQUARE])
def test_bf16_holds_code_times_scale_exactly(block):
    for x in tensors().values():
        quantized = nvfp4.quantize(x.bfloat16(), block)
        exact = nvfp4.dequantize_blocks(quantized, torch.float64)
        assert torch.equal(nvfp4.dequantize_blocks(quantized).double(), exact)
    codes, scales = torch.arange(16), torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every_product = e2m1_values(codes)[:, None] * scales.float()
    assert torch.equal(every_product.bfloat16().float(), every_product)


@pytest.mark.parametrize(("block", "bound"), [(ALONG_ROWS, 0.105), (SQUARE, 0.125)])
def test_the_error_on_normal_numbers_is_bounded(block, bound):
    x = random_bf16(512, 1024)
    assert bound * 0.8 < error(nvfp4.dequantize(nvfp4.quantize(x, block)), x) < bound


# --- matmuls ---


def test_the_forward_matmul_is_that_of_the_reference():
    """With the global factors applied to the result it is equal; with them in the rounded operands, close."""
    x, weight = random_bf16(64, 256), random_bf16(48, 256, std=0.02)
    quantizer = reference((1, 16))
    qx, qw = quantizer.quantize(x), reference((16, 16)).quantize(weight)
    expected = quantizer.qgemm(
        qx.data, qw.data, None, torch.bfloat16, qx.scale, qw.scale, qresult_x=qx, qresult_w=qw
    )
    x4, w4 = nvfp4.quantize(x), nvfp4.quantize(weight, SQUARE)
    products = nvfp4.dequantize_blocks(x4).float() @ nvfp4.dequantize_blocks(w4).float().t()
    factor = x4.amax * w4.amax / nvfp4.LARGEST**2
    assert torch.equal((products * factor).bfloat16(), expected)
    assert error(nvfp4.dequantize(x4) @ nvfp4.dequantize(w4).t(), expected) < 0.005


# --- stochastic rounding ---


@pytest.mark.parametrize("block", [ALONG_ROWS, ALONG_COLUMNS])
def test_given_bits_decide_the_codes_and_nothing_else(block):
    x = random_bf16(64, 64, std=1e-3)
    bits = torch.randint(256, x.shape, generator=torch.Generator().manual_seed(0))
    nearest, drawn = nvfp4.quantize(x, block), nvfp4.quantize(x, block, bits=bits)
    assert torch.equal(nearest.scales.view(torch.uint8), drawn.scales.view(torch.uint8))
    encode = 1.0 / (drawn.scales.float() * (1.0 / nvfp4.global_encode_scale(drawn.amax)))
    scaled = (x.float() * encode.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)).clamp(-6, 6)
    assert torch.equal(e2m1_values(drawn.codes), round_to_e2m1_stochastically(scaled, bits))
    assert not torch.equal(drawn.codes, nearest.codes)


# --- Hadamard transform ---


def test_the_transform_is_that_of_the_reference():
    x = random_bf16(256, 512)
    quantizer = reference((1, 16), hadamard=True)
    assert torch.equal(random_hadamard(x, dim=1), quantizer._apply_rht(x))
    assert torch.equal(random_hadamard(x, dim=0), quantizer._apply_rht(x.t().contiguous()).t())


def test_the_transform_is_orthogonal_so_that_it_cancels_in_a_matmul():
    matrix = random_hadamard(torch.eye(16).bfloat16(), dim=1).float()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))
    assert matrix.abs().eq(0.25).all()
    a, b = random_bf16(32, 64), random_bf16(48, 64)
    product = random_hadamard(a, 1).float() @ random_hadamard(b, 1).float().t()
    assert error(product, a.float() @ b.float().t()) < 0.01


# --- errors ---


@pytest.mark.parametrize(
    ("shape", "block", "message"),
    [
        ((16, 24), ALONG_ROWS, "16 x 24 cannot be divided into blocks of 1 x 16"),
        ((24, 16), SQUARE, "24 x 16 cannot be divided into blocks of 16 x 16"),
    ],
)
def test_a_matrix_that_blocks_do_not_divide_is_an_error(shape, block, message):
    with pytest.raises(ValueError, match=message):
        nvfp4.quantize(torch.zeros(shape), block)


def test_what_the_transform_cannot_take_is_an_error():
    with pytest.raises(ValueError, match="a bf16 matrix .* is needed, not torch.float32"):
        random_hadamard(torch.zeros(16, 16), dim=0)
    with pytest.raises(
        ValueError, match=r"dimension 0 is a multiple of 16 is needed, not torch.bfloat16 \(24, 16\)"
    ):
        random_hadamard(torch.zeros(24, 16, dtype=torch.bfloat16), dim=0)
