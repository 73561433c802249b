"""MXFP8 against torchao, NVFP4 and its Hadamard transform against TransformerEngine's Python reference; and
the operands that emulate both: their random bits, and torch.compile."""

import pytest
import torch
from support.te_reference import nvfp4_reference
from support.tensors import error, random, random_bf16

from ops.quantization.random_bits import bf16_stochastically, random_bits, random_key
from recipes.formats import mxfp8, nvfp4
from recipes.formats.hadamard import random_hadamard
from recipes.formats.numbers import e2m1_values, round_to_e2m1_stochastically
from recipes.formats.nvfp4 import ALONG_COLUMNS, ALONG_ROWS, SQUARE
from recipes.mxfp8 import mxfp8_operand
from recipes.nvfp4_linear import COLUMNS, ROWS, bits_of_operand, nvfp4_amaxes, nvfp4_operand, nvfp4_weight

KEY = random_key(1337, iteration=20, micro_step=3, tensor=17)

# --- MXFP8 ---


def torchao_to_mx(x):
    """(codes, exponents) of torchao, blocks of 32 along the last dimension, scales rounded up."""
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="pip install torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    exponents, values = module.to_mx(x.contiguous(), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    return values.view(torch.uint8), exponents.view(torch.uint8)


def every_amax():
    """A block for each positive bf16 number that is its amax."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = random_bf16(len(amax), 32).float()
    x = x / x.abs().amax(1, keepdim=True) * amax.float()[:, None]
    x[:, 7] = -amax.float()
    return x.bfloat16()


def not_finite():
    """Blocks of zeros, with nan, with inf, with both, and a usual one."""
    x = random_bf16(5, 32)
    x[0] = 0
    x[1, 3] = torch.nan
    x[2, 3] = torch.inf
    x[3, 3], x[3, 4] = -torch.inf, torch.nan
    return x


OF_MXFP8 = {
    **{f"{dtype}, {std}": random(256, 512, dtype=dtype, std=std)
       for dtype in (torch.bfloat16, torch.float32) for std in (1e-30, 0.02, 1.0, 1e30)},
    "every amax": every_amax(),  # also subnormal ones, and those whose exponent has code 0
    "not finite": not_finite(),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_MXFP8)
def test_codes_and_exponents_are_those_of_torchao(name):
    ours = mxfp8.quantize(OF_MXFP8[name])
    values, exponents = torchao_to_mx(OF_MXFP8[name])
    assert torch.equal(ours.exponents, exponents)
    assert torch.equal(ours.values.view(torch.uint8), values)


def test_nan_and_inf_do_not_hide_in_mxfp8():
    quantized = mxfp8.quantize(not_finite())
    assert quantized.exponents[:4, 0].tolist() == [0, 255, 254, 255]
    values = mxfp8.dequantize(quantized)
    assert values[[1, 3]].isnan().all() and values[2, 3] == torch.inf
    assert values[[0, 4]].isfinite().all()


def test_columns_are_the_rows_of_the_transpose():
    x = random_bf16(96, 80)
    by_columns = mxfp8.quantize(x, mxfp8.ALONG_COLUMNS)
    by_rows = mxfp8.quantize(x.t()[:, :96].contiguous())
    assert by_columns.exponents.shape == (3, 80)
    assert torch.equal(by_columns.exponents, by_rows.exponents.t())
    assert torch.equal(by_columns.values.float(), by_rows.values.float().t())


def test_bf16_holds_the_values_of_mxfp8_exactly():
    x = every_amax()
    x = x[x.float().abs().amax(1) < 2.0**127]  # the largest numbers are rounded up to 2^128: inf
    quantized = mxfp8.quantize(x)
    exact = quantized.values.double() * 2.0 ** (quantized.exponents.double() - 127)
    assert torch.equal(mxfp8.dequantize(quantized, torch.float32).double(), exact)
    normal = exact.abs() >= 2.0**-126
    assert torch.equal(mxfp8.dequantize(quantized).double()[normal], exact[normal])


# --- NVFP4 ---


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
    """What a run has, and what is hard: rows of zeros, outliers, very small, very large, all 0, an inf."""
    normal = random(128, 256)
    outliers = normal * (1 + 200 * (random(256, 128).t() > 3))
    zeros, with_inf = normal.clone(), normal.clone()
    zeros[::3] = 0
    with_inf[5, 7] = torch.inf
    mixed = normal * 10.0 ** torch.linspace(-12, 4, 128)[:, None]
    made = {"normal": normal, "outliers": outliers, "rows of zeros": zeros, "of many sizes": mixed}
    made |= {"small": normal * 1e-30, "subnormal": normal * 1e-39, "large": normal * 1e30}
    return made | {"zero": torch.zeros(128, 256), "inf": with_inf}


TENSORS = tensors()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", TENSORS)
def test_blocks_are_those_of_the_reference_along_rows_and_columns_and_square(name, dtype):
    x = TENSORS[name].to(dtype)
    codes, scales, codes_t, scales_t, amax, amax_t = reference((1, 16))._quantize(x)
    assert_equals_reference(nvfp4.quantize(x, ALONG_ROWS), codes, scales, amax)
    assert_equals_reference(nvfp4.quantize(x, ALONG_COLUMNS), codes_t, scales_t, amax_t, transposed=True)
    codes, scales, *_, amax, _ = reference((16, 16))._quantize(x)
    assert_equals_reference(nvfp4.quantize(x, SQUARE), codes, scales, amax)
    if dtype == torch.bfloat16 and name not in ("subnormal", "inf"):  # of which a CPU's bf16 matmuls make 0
        _, _, codes, scales, _, amax = reference((1, 16), hadamard=True)._quantize(x)
        ours = nvfp4.quantize(random_hadamard(x, dim=0), ALONG_COLUMNS)
        assert_equals_reference(ours, codes, scales, amax, transposed=True)


def test_nan_and_inf_do_not_hide_in_nvfp4():
    x = random_bf16(32, 32)
    x[1, 1] = torch.nan
    assert nvfp4.dequantize(nvfp4.quantize(x)).isnan().all()
    for block in (ALONG_ROWS, SQUARE):
        assert nvfp4.dequantize(nvfp4.quantize(TENSORS["inf"], block))[5, 7] == torch.inf


def test_an_amax_that_is_known_is_used():
    x = random_bf16(32, 32)
    ours, known = nvfp4.quantize(x), nvfp4.quantize(x, amax=x.abs().amax().view(1, 1))
    assert torch.equal(ours.codes, known.codes) and torch.equal(ours.amax, known.amax)
    assert not torch.equal(ours.scales.float(), nvfp4.quantize(x, amax=x.abs().amax() * 3).scales.float())


def test_a_weight_has_the_same_values_in_forward_and_backward():
    weight = random_bf16(64, 96)
    forward, backward = nvfp4.quantize(weight, SQUARE), nvfp4.quantize(weight.t().contiguous(), SQUARE)
    assert torch.equal(nvfp4.dequantize(forward), nvfp4.dequantize(backward).t())


@pytest.mark.parametrize("block", [ALONG_ROWS, ALONG_COLUMNS, SQUARE])
def test_bf16_holds_code_times_scale_exactly(block):
    for x in TENSORS.values():
        quantized = nvfp4.quantize(x.bfloat16(), block)
        exact = nvfp4.dequantize_blocks(quantized, torch.float64)
        assert torch.equal(nvfp4.dequantize_blocks(quantized).double(), exact)
    codes, scales = torch.arange(16), torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every_product = e2m1_values(codes)[:, None] * scales.float()
    assert torch.equal(every_product.bfloat16().float(), every_product)


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
    assert nvfp4.global_factor(x4) * nvfp4.global_factor(w4) == pytest.approx(factor.item(), rel=1e-6)
    assert torch.equal((products * factor).bfloat16(), expected)
    assert error(nvfp4.dequantize(x4) @ nvfp4.dequantize(w4).t(), expected) < 0.005


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


def test_the_hadamard_transform_is_that_of_the_reference_and_orthogonal():
    x = random_bf16(256, 512)
    quantizer = reference((1, 16), hadamard=True)
    assert torch.equal(random_hadamard(x, dim=1), quantizer._apply_rht(x))
    assert torch.equal(random_hadamard(x, dim=0), quantizer._apply_rht(x.t().contiguous()).t())
    matrix = random_hadamard(torch.eye(16).bfloat16(), dim=1).float()
    assert torch.equal(matrix @ matrix.t(), torch.eye(16)) and matrix.abs().eq(0.25).all()


# --- operands that are emulated ---


def test_a_gradients_two_forms_are_rounded_with_bits_of_their_own():
    x = random_bf16(64, 96)
    rows, columns = (bits_of_operand(x, KEY, s) for s in (ROWS, COLUMNS))
    correlation = torch.corrcoef(torch.stack((rows.flatten(), columns.flatten())).float())[0, 1]
    assert abs(correlation) < 4 / rows.numel() ** 0.5
    by_rows, _ = nvfp4_operand(x, nvfp4_amaxes(x), KEY)
    assert torch.equal(by_rows, nvfp4.dequantize(nvfp4.quantize(x, bits=rows)))
    assert not torch.equal(by_rows, nvfp4.dequantize(nvfp4.quantize(x)))


def test_a_counter_has_the_bits_of_16_rows_of_a_column_or_of_two_rows_of_8_columns():
    x = torch.zeros(48, 32, dtype=torch.bfloat16)
    counter = 2 * 32 + 5  # rows 32 to 47, column 5
    expected = random_bits(16, KEY, stream=COLUMNS, start=16 * counter)
    assert torch.equal(bits_of_operand(x, KEY, COLUMNS)[32:48, 5], expected)
    counter = 17 * 4 + 3  # rows 34 and 35, columns 24 to 31
    expected = random_bits(16, KEY, stream=ROWS, start=16 * counter).view(4, 2, 2)
    for row in (0, 1):  # of 4 numbers, 2 are in each row
        assert torch.equal(bits_of_operand(x, KEY, ROWS)[34 + row, 24:], expected[:, row].flatten())


CASTS = {
    "mxfp8 operand": lambda x, key: torch.cat(mxfp8_operand(x)),
    "nvfp4 operand": lambda x, key: torch.cat(nvfp4_operand(x, nvfp4_amaxes(x), key)),
    "nvfp4 weight": lambda x, key: nvfp4_weight(x, x.abs().amax().float()),
    "bf16 of fp32": lambda x, key: bf16_stochastically(x, key, start=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASTS)
def test_compiled_code_gives_the_bits_of_eager_code_in_one_graph(name):
    def quantized(x, key):
        return function(x * 1.7, key)  # a product of which torch.compile keeps more digits than bf16 has

    torch._dynamo.reset()  # it counts how often a function is compiled anew, also one per test
    function, x = CASTS[name], (random if "fp32" in name else random_bf16)(128, 256)
    compiled = torch.compile(quantized, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for key in (KEY, random_key(1, 2, 3, 4)):  # read at each call
            assert torch.equal(compiled(x, key), quantized(x, key))


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (mxfp8.quantize, (0, 32), "0 x 32 cannot be divided"),
        (mxfp8.quantize, (2, 32, 32), "2 x 32 x 32 cannot be divided"),
        (mxfp8_operand, (48, 64), "48 x 64 cannot be divided into blocks of 32 x 1"),
        (mxfp8_operand, (64, 48), "64 x 48 cannot be divided into blocks of 1 x 32"),
        (nvfp4.quantize, (16, 24), "16 x 24 cannot be divided into blocks of 1 x 16"),
        (nvfp4_amaxes, (24, 64), "24 x 64 cannot be divided into blocks of 16 x 16"),
        (lambda x: random_hadamard(x, 0), (24, 16),
         r"dimension 0 is a multiple of 16 is needed, not torch.bfloat16 \(24, 16\)"),
        (lambda x: nvfp4_amaxes(x.float()), (32, 64), "operands are bf16, not torch.float32"),
        (lambda x: random_hadamard(x.float(), 0), (16, 16), "a bf16 matrix .* is needed, not torch.float32"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_an_error(function, shape, message):
    with pytest.raises(ValueError, match=message):
        function(torch.zeros(shape, dtype=torch.bfloat16))
