"""The kernels of emulated MXFP8 and NVFP4 against their plain forms, and the plain forms on a GPU."""

import pytest
import torch
from support.all_recipes import BLOCKS, RECIPES
from support.tensors import random, random_bf16

from ops.float8_recipe import compare_float8
from ops.quantization.random_bits import bf16_stochastically, random_bits, random_key
from recipes.formats.hadamard import random_hadamard
from recipes.mxfp8 import mxfp8_operand
from recipes.nvfp4_linear import nvfp4_amaxes, nvfp4_operand, nvfp4_weight
from training.hardware.capability import capability

pytestmark = pytest.mark.gpu
KEY = random_key(1337, iteration=20, micro_step=3, tensor=17)


@pytest.mark.parametrize("shape", [(32, 32), (96, 544), (160, 1056), (256, 6144)])
def test_every_kernel_gives_the_bits_of_its_plain_form(shape):
    from support.emulated_operands import assert_kernels_equal_plain_forms

    assert_kernels_equal_plain_forms(shape, "cuda")


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_comparison_at_the_start_finds_nothing(recipe):
    kind, device = RECIPES[recipe], torch.device("cuda")
    if kind.support(capability(device)) is None:
        pytest.skip("needs fp8")
    found = kind.compare_casts(device) if recipe in BLOCKS else compare_float8(device, 50_304)
    assert found is None


def test_a_matrix_may_begin_between_two_words_of_memory():
    x = random_bf16(1, 64 * 96 + 1, device="cuda")[0, 1:].view(64, 96)
    assert x.data_ptr() % 4 == 2

    def operands(x):
        amaxes = nvfp4_amaxes(x)
        weight = nvfp4_weight(x, amaxes[0])
        return amaxes, weight, *mxfp8_operand(x), *nvfp4_operand(x, amaxes)

    for a, b in zip(operands(x), operands(x.clone()), strict=True):
        assert torch.equal(a, b)


def test_the_operations_run_the_kernels_on_a_gpu_also_compiled():
    x = random_bf16(96, 544)

    def operands(x, key):
        x = x * 1.7  # torch.compile would keep more digits of it than bf16 has
        amaxes = nvfp4_amaxes(x)
        weight = nvfp4_weight(x, amaxes[0])
        return *mxfp8_operand(x), *nvfp4_operand(x, amaxes, key), weight

    plain = operands(x, KEY)
    for function in (operands, torch.compile(operands, fullgraph=True)):
        for a, b in zip(function(x.cuda(), KEY.cuda()), plain, strict=True):
            assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("function", ["hadamard", "bits", "bf16"])
def test_a_plain_form_gives_the_bits_of_a_cpu_on_a_gpu(function):
    x, fp32 = random_bf16(128, 256), random(128, 256)
    functions = {
        "hadamard": lambda x, fp32, key: (random_hadamard(x, 0), random_hadamard(x, 1)),
        "bits": lambda x, fp32, key: (random_bits(1000, key, bits=16),),
        "bf16": lambda x, fp32, key: (bf16_stochastically(fp32, key),),
    }
    here = functions[function](x, fp32, KEY)
    there = functions[function](x.cuda(), fp32.cuda(), KEY.cuda())
    for a, b in zip(there, here, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))
