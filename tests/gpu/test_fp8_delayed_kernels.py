"""Delayed scaling on a GPU: its kernels against their plain forms, in compiled code."""

import pytest
import torch
from support.tensors import E4M3, E5M2, random, random_bf16

from ops import float8
from recipes.delayed_casts import delayed_quantize, delayed_requantize, delayed_swiglu_backward
from recipes.formats import delayed_scaling

pytestmark = pytest.mark.gpu


def same(a, b):
    return all(torch.equal(x.cpu().float(), y.cpu().float()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", [(128, 64), (300, 6144), (301, 96), (640, 2080)])
def test_every_cast_gives_the_bits_of_the_plain_form(shape):
    from support.fp8_delayed_casts import assert_delayed_kernels_equal_plain_forms

    assert_delayed_kernels_equal_plain_forms(shape, "cuda")


@pytest.mark.parametrize("shape", [(128, 64), (272, 1056), (64, 6144)])
def test_the_backward_of_swiglu_has_the_bits_of_a_cast_of_the_one_in_bf16(shape):
    from support.fp8_delayed_casts import assert_swiglu_kernels_equal_a_cast

    assert_swiglu_kernels_equal_a_cast(shape, "cuda")


def test_weights_are_written_where_they_are():
    matrices = [random(300, 6144, device="cuda"), random_bf16(64, 48, std=0.02, device="cuda")]
    into = [float8.empty_like(matrix) for matrix in matrices]
    scales, amaxes = torch.tensor([0.0, 512.0], device="cuda"), torch.zeros(2, device="cuda")
    delayed_requantize(matrices, into, scales, amaxes)
    for written, matrix, scale, amax in zip(into, matrices, scales, amaxes, strict=True):
        expected = torch.zeros((), device="cuda")
        assert same(written, delayed_quantize(matrix.bfloat16(), scale, expected, E4M3))
        assert amax == expected


def step(x, dh, scales, amaxes):
    first = delayed_quantize(x * 1.7, scales[0], amaxes[0], E4M3)
    second = delayed_quantize(dh, scales[1], amaxes[1], E5M2, dh.abs().amax(-1))
    return *first, *second, *delayed_swiglu_backward(x, dh, scales[2], amaxes[2], E5M2)


def state():
    """scale, history, amax, and what scales map to."""
    mapped_to = torch.tensor([448.0, 57344.0, 57344.0], device="cuda")
    zeros = [torch.zeros(shape, device="cuda") for shape in ((3,), (4, 3), (3,))]
    return (*zeros, mapped_to)


def test_compiled_code_updates_the_states_of_several_tensors_in_one_graph():
    torch._dynamo.reset()
    x, dh = random_bf16(256, 2048, device="cuda"), random_bf16(256, 1024, device="cuda")
    compiled = torch.compile(step, fullgraph=True)
    results = []
    for function in (compiled, step):
        scale, history, amax, mapped_to = state()
        for factor in (1.0, 2.0):
            found = function(x * factor, dh, scale.unbind(), amax.unbind())
            delayed_scaling.update_all(scale, history, amax, mapped_to)
        results.append((*found, scale, history))
    assert same(*results) and results[0][-2].all()


def test_the_update_in_place_gives_the_bits_of_a_cpu():
    here = random(400).abs(), random(1024, 400).abs(), random(400).abs(), torch.full((400,), 448.0)
    here[2][3:5], here[0][7] = torch.tensor([0.0, torch.inf]), 0
    there = [part.cuda() for part in here]
    for _ in range(2):
        delayed_scaling.update_all(*here)
        delayed_scaling.update_all(*there)
        assert same(there, here)
        here[2].fill_(2.0)
        there[2].fill_(2.0)
