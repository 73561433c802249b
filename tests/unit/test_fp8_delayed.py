"""Casts by the scale of the past, with and without a history; and delayed scaling, whose traces are worked
out by hand from TransformerEngine's kernel."""

import pytest
import torch
from support.tensors import E4M3, E5M2, random, random_bf16

from ops import float8
from ops.swiglu import swiglu_backward
from recipes.delayed_casts import delayed_quantize, delayed_requantize, delayed_swiglu_backward
from recipes.formats.delayed_scaling import update_all

INF, NAN = torch.inf, torch.nan
FP32_MAX = torch.finfo(torch.float32).max


def state(scale=0.0, amax=0.0):
    return torch.tensor(scale), torch.tensor(amax)


def same(a, b):
    return all(torch.equal(x.float(), y.float()) for x, y in zip(a, b, strict=True))


# --- casts ---


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("earlier", [0.0, 1e4])  # the amax of a cast since the update scales nothing
def test_without_a_history_a_tensor_is_scaled_by_its_own_amax(dtype, earlier):
    x, (scale, amax) = random_bf16(32, 48, std=7.0), state(amax=earlier)
    assert same(delayed_quantize(x, scale, amax, dtype), float8.quantize(x, dtype))
    assert (scale.item(), amax.item()) == (0, max(x.abs().max(), earlier))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_with_a_history_the_scale_of_the_past_is_used_and_the_largest_numbers_saturate(dtype):
    largest = torch.finfo(dtype).max
    x, (scale, amax) = random_bf16(32, 48), state(scale=float(largest))
    x[3, 5], x[7, 9] = 0.5, -8.0
    cast = delayed_quantize(x, scale, amax, dtype)
    assert cast.rows[3, 5].float() == largest / 2 and cast.rows[7, 9].float() == -largest
    assert torch.equal(cast.columns.float(), cast.rows.float().t())
    assert cast.inverse_scale == 1 / scale
    assert amax == 8.0  # of x as it is read


@pytest.mark.parametrize("scale", [0.0, 3.5])
def test_a_known_amax_gives_the_same_cast_and_state(scale):
    x, results = random_bf16(32, 48), []
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


def update(scale, history, amax, *dtypes, algorithm="max"):
    """The state afterwards. dtypes: of each tensor, or one of all."""
    scale, history, amax = scale.clone(), history.clone(), amax.clone()
    mapped_to = torch.tensor([torch.finfo(dtype).max for dtype in dtypes]).expand(len(scale))
    update_all(scale, history, amax, mapped_to, algorithm)
    assert not amax.any()
    return scale, history


def trace(amaxes, length, dtype=E4M3, start=1.0, **settings):
    """The scales of one tensor after each update, and the last history. The state begins as in
    TransformerEngine: scale 1, history 0."""
    scale, history = torch.tensor([start]), torch.zeros(length, 1)
    scales = []
    for amax in amaxes:
        scale, history = update(scale, history, torch.tensor([float(amax)]), dtype, **settings)
        scales.append(scale.item())
    return scales, history.flatten().tolist()


@pytest.mark.parametrize(
    ("amaxes", "length", "algorithm", "amax_in_force", "history"),
    [
        ([1, 8, 2, 2, 2, 2, 2], 4, "max", [1, 8, 8, 8, 8, 2, 2], [0, 2, 2, 2]),
        ([1, 8, 2, 2], 4, "most_recent", [1, 8, 2, 2], [0, 8, 2, 2]),
        ([1, 8, 2], 1, "max", [1, 8, 2], [0]),
        ([1, 8, 2], 1, "most_recent", [1, 8, 2], [0]),
        ([8, 2, 2], 2, "max", [8, 8, 2], [0, 2]),
        ([4, 0, 0, 1], 3, "max", [4, 4, 4, 4], [0, 4, 1]),  # a tensor that was not used keeps its state
        ([4, 0, 1], 3, "most_recent", [4, 4, 1], [0, 4, 1]),
        # inf is in force as long as it is remembered
        ([4, INF, 1, 1, 1], 3, "max", [4, 4, 4, 4, 1], [0, 1, 1]),
        ([4, INF, 1], 3, "most_recent", [4, 4, 1], [0, INF, 1]),
        ([4, NAN, 1], 4, "max", [4, 4, 4], None),  # fmaxf skips nan
        ([NAN, 2], 4, "max", [448, 2], None),
        ([4, NAN, 1], 4, "most_recent", [4, 4, 1], None),
        ([0, 0], 4, "max", [448, 448], [0, 0, 0, 0]),  # 1 until it was used
        ([INF], 4, "max", [448], None),
    ],
)
def test_a_trace(amaxes, length, algorithm, amax_in_force, history):
    """The scale is 448 / (the amax in force); 1 at the start is that of 448."""
    scales, last = trace(amaxes, length, algorithm=algorithm)
    assert scales == [448 / amax for amax in amax_in_force]
    assert history is None or last == history


def test_a_tensor_without_a_history_has_none_until_its_first_finite_amax():
    assert trace((0.0, INF, NAN, 2.0, 0.0), 1, start=0.0)[0] == [0.0, 0.0, 0.0, 224.0, 224.0]


def test_the_format_decides_the_largest_number_and_fp32_the_largest_scale():
    assert trace([2.0], 4, dtype=E5M2)[0] == [28672.0]
    scale, _ = update(torch.ones(2), torch.zeros(4, 2), torch.tensor([2.0, 2.0]), E4M3, E5M2)
    assert scale.tolist() == [224.0, 28672.0]
    assert trace([1e-38, 1.0], 1)[0] == [FP32_MAX, 448.0]


def test_a_division_is_rounded_once():
    amaxes = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    scales, _ = update(torch.ones(1000), torch.zeros(4, 1000), amaxes, E4M3)
    assert torch.equal(scales, (448 / amaxes.double()).float())


def test_an_amax_that_casts_left_in_the_history_counts():
    history = torch.tensor([[8.0], [2.0], [3.0]])
    scale, rolled = update(torch.ones(1), history, torch.zeros(1), E4M3)
    assert scale.tolist() == [56.0] and rolled.flatten().tolist() == [0, 3, 8]


def test_tensors_do_not_see_each_other():
    scale, history = update(torch.ones(3), torch.zeros(2, 3), torch.tensor([1.0, 0.0, INF]), E4M3)
    assert scale.tolist() == [448, 1, 1] and history.tolist() == [[0, 0, 0], [1, 0, INF]]


def test_bad_shapes_are_errors():
    scale, history, amax = torch.ones(2), torch.zeros(4, 2), torch.ones(2)
    for bad in (torch.zeros(0, 2), torch.zeros(4, 3), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"needs scale \(n\), history \(L, n\) with L at least 1"):
            update(scale, bad, amax, E4M3)
    with pytest.raises(ValueError, match=r"got \(2,\), \(4, 2\), \(1,\)"):
        update(scale, history, amax[:1], E4M3)


# --- torch.compile ---


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
            update_all(scale, history, amax, torch.tensor([448.0, 57344.0, 57344.0]))
        results.append((*found, scale, history))
    assert same(*results) and results[0][-2].all()
