"""Casts by the scale of the past: with and without a history, their amax, the update in place, compiled."""

import pytest
import torch
from support.tensors import E4M3, E5M2, random, random_bf16

from ops import float8
from ops.swiglu import swiglu_backward
from recipes.delayed_casts import delayed_quantize, delayed_requantize, delayed_swiglu_backward
from recipes.formats import delayed_scaling

INF, NAN = torch.inf, torch.nan


def state(scale=0.0, amax=0.0):
    return torch.tensor(scale), torch.tensor(amax)


def same(a, b):
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))


# --- casts ---


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_without_a_history_a_tensor_is_scaled_by_its_own_amax(dtype):
    x, (scale, amax) = random_bf16(32, 48, std=7.0), state()
    assert same(delayed_quantize(x, scale, amax, dtype), float8.quantize(x, dtype))
    assert (scale.item(), amax.item()) == (0, x.abs().max())


def test_an_earlier_cast_since_the_update_does_not_scale_a_tensor_without_a_history():
    x, (scale, amax) = random_bf16(32, 48), state(amax=1e4)
    assert same(delayed_quantize(x, scale, amax, E4M3), float8.quantize(x, E4M3))
    assert amax.item() == 1e4


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_with_a_history_the_scale_of_the_past_is_used_and_the_largest_numbers_saturate(dtype):
    x, (scale, amax) = random_bf16(32, 48), state(scale=float(torch.finfo(dtype).max))
    x[3, 5], x[7, 9] = 0.5, -8.0
    cast = delayed_quantize(x, scale, amax, dtype)
    largest = torch.finfo(dtype).max
    assert cast.rows[3, 5].float() == largest / 2 and cast.rows[7, 9].float() == -largest
    assert torch.equal(cast.columns.float(), cast.rows.float().t())
    assert cast.inverse_scale == 1 / scale
    assert amax == 8.0  # of x as it is read


@pytest.mark.parametrize("scale", [0.0, 3.5])
def test_a_known_amax_gives_the_same_cast_and_state(scale):
    x = random_bf16(32, 48)
    results = []
    for known in (None, x.abs().amax(-1), x.abs().float().amax()):
        arguments = state(scale, amax=0.25)
        results.append((*delayed_quantize(x, *arguments, E5M2, known), arguments[1]))
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert results[0][3] == x.abs().max()


def test_the_amax_is_that_of_all_casts_since_the_update():
    scale, amax = state(scale=2.0)
    for x, largest in ((0.5, 0.5), (-4.0, 4.0), (1.0, 4.0)):
        delayed_quantize(torch.full((16, 16), x).bfloat16(), scale, amax, E4M3)
        assert amax.item() == largest


@pytest.mark.parametrize("scale", [0.0, 2.0])
@pytest.mark.parametrize("wrong", [INF, -INF, NAN])
def test_inf_and_nan_show_in_the_amax_and_nan_stays_there(scale, wrong):
    x, (scale, amax) = random_bf16(16, 16), state(scale)
    x[3, 4] = wrong
    cast = delayed_quantize(x, scale, amax, E4M3)
    assert not amax.isfinite() and amax.isnan() == x.isnan().any()
    if not scale:  # as fp8_tensorwise does
        assert not (cast.rows.float() * cast.inverse_scale).isfinite().all()
    delayed_quantize(random_bf16(16, 16), scale, amax, E4M3)
    assert not amax.isfinite()


@pytest.mark.parametrize("scale", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_backward_of_swiglu_is_cast_like_its_result_in_bf16(scale, dtype):
    x, dh = random_bf16(32, 96), random_bf16(32, 48)
    ours, plain = state(scale), state(scale)
    expected = delayed_quantize(swiglu_backward(x, dh), *plain, dtype)
    assert same(delayed_swiglu_backward(x, dh, *ours, dtype), expected)
    assert ours == plain and ours[1] > 0


def test_weights_are_written_where_they_are():
    matrices = [random(48, 32), random(16, 64, std=0.02)]
    into = [float8.empty_like(matrix) for matrix in matrices]
    addresses = [part.data_ptr() for written in into for part in written]
    scales, amaxes = torch.tensor([0.0, 512.0]), torch.zeros(2)
    delayed_requantize(matrices, into, scales, amaxes)
    assert [part.data_ptr() for written in into for part in written] == addresses
    rounded = [matrix.bfloat16() for matrix in matrices]
    assert amaxes.tolist() == [matrix.abs().max() for matrix in rounded]
    for written, matrix, scale in zip(into, rounded, scales, strict=True):
        assert same(written, delayed_quantize(matrix, scale, torch.zeros(()), E4M3))


# --- the update in place ---


def test_a_tensor_without_a_history_has_none_until_its_first_finite_amax():
    scale, history, amax = torch.zeros(1), torch.zeros(1, 1), torch.zeros(1)
    for found, expected in ((0.0, 0.0), (INF, 0.0), (NAN, 0.0), (2.0, 224.0), (0.0, 224.0)):
        amax.fill_(found)
        delayed_scaling.update_all(scale, history, amax, torch.tensor([448.0]))
        assert scale.item() == expected


# --- torch.compile ---


def test_fake_tensors_have_the_shapes_of_real_ones():
    x, one = random_bf16(32, 48), torch.ones(())
    operations = torch.ops.nanomfu
    for operation, arguments in (
        (operations.delayed_quantize, (x, one, one.clone(), E4M3, None)),
        (operations.delayed_quantize, (x, one, one.clone(), E5M2, x.abs().amax(-1))),
        (operations.delayed_swiglu_backward, (x, x[:, :24], one, one.clone(), E5M2)),
        (
            operations.update_all_delayed_scaling,
            (torch.ones(3), torch.ones(2, 3), torch.ones(3), torch.ones(3), True),
        ),
    ):
        torch.library.opcheck(operation.default, arguments, test_utils="test_faketensor")


def test_compiled_code_updates_the_states_of_several_tensors_in_one_graph():
    """The states are views into tensors of the whole model."""

    def step(x, dh, scales, amaxes):
        first = delayed_quantize(x * 1.7, scales[0], amaxes[0], E4M3)
        second = delayed_quantize(dh, scales[1], amaxes[1], E5M2, dh.abs().amax(-1))
        return *first, *second, *delayed_swiglu_backward(x, dh, scales[2], amaxes[2], E5M2)

    torch._dynamo.reset()  # it counts how often a function is compiled anew, also one per test
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, dh = random_bf16(32, 96), random_bf16(32, 48)
    results = []
    for function in (compiled, step):
        scale, history, amax = torch.zeros(3), torch.zeros(4, 3), torch.zeros(3)
        for factor in (1.0, 2.0):
            found = function(x * factor, dh, scale.unbind(), amax.unbind())
            delayed_scaling.update_all(scale, history, amax, torch.tensor([448.0, 57344.0, 57344.0]))
        results.append((*found, scale, history))
    assert same(*results) and results[0][-2].all()
