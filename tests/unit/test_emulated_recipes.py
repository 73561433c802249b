"""Emulated operands: their values, their random bits, torch.compile."""

import pytest
import torch
from support.tensors import random, random_bf16

from ops.quantization.random_bits import bf16_stochastically, random_bits, random_key
from recipes.formats import nvfp4
from recipes.mxfp8 import mxfp8_operand
from recipes.nvfp4_linear import COLUMNS, ROWS, bits_of_operand, nvfp4_amaxes, nvfp4_operand, nvfp4_weight

KEY = random_key(1337, iteration=20, micro_step=3, tensor=17)


# --- random bits ---


def test_a_gradients_two_forms_are_rounded_with_bits_of_their_own():
    x = random_bf16(64, 96)
    rows, columns = (bits_of_operand(x, KEY, s) for s in (ROWS, COLUMNS))
    correlation = torch.corrcoef(torch.stack((rows.flatten(), columns.flatten())).float())[0, 1]
    assert abs(correlation) < 4 / rows.numel() ** 0.5
    by_rows, _ = nvfp4_operand(x, nvfp4_amaxes(x), KEY)
    assert torch.equal(by_rows, nvfp4.dequantize(nvfp4.quantize(x, bits=rows)))
    assert not torch.equal(by_rows, nvfp4.dequantize(nvfp4.quantize(x)))


def test_along_columns_a_counter_has_the_bits_of_16_rows_of_a_column():
    x = torch.zeros(48, 32, dtype=torch.bfloat16)
    bits = bits_of_operand(x, KEY, COLUMNS)
    counter = 2 * 32 + 5  # rows 32 to 47, column 5
    expected = random_bits(16, KEY, stream=COLUMNS, start=16 * counter)
    assert torch.equal(bits[32:48, 5], expected)


def test_along_rows_a_counter_has_the_bits_of_two_rows_of_8_columns():
    x = torch.zeros(48, 32, dtype=torch.bfloat16)
    bits = bits_of_operand(x, KEY, ROWS)
    counter = 17 * 4 + 3  # rows 34 and 35, columns 24 to 31
    expected = random_bits(16, KEY, stream=ROWS, start=16 * counter).view(4, 2, 2)
    for row in (0, 1):  # of 4 numbers, 2 are in each row
        assert torch.equal(bits[34 + row, 24:], expected[:, row].flatten())


# --- torch.compile ---

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


# --- errors ---


@pytest.mark.parametrize(
    ("function", "x", "message"),
    [
        (mxfp8_operand, random_bf16(48, 64), "48 x 64 cannot be divided into blocks of 32 x 1"),
        (mxfp8_operand, random_bf16(64, 48), "64 x 48 cannot be divided into blocks of 1 x 32"),
        (nvfp4_amaxes, random_bf16(24, 64), "24 x 64 cannot be divided into blocks of 16 x 16"),
        (nvfp4_amaxes, random(32, 64), "operands are bf16, not torch.float32"),
    ],
)
def test_what_cannot_be_emulated_is_an_error(function, x, message):
    with pytest.raises(ValueError, match=message):
        function(x)
