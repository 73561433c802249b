"""Delayed scaling: traces worked out by hand from TransformerEngine's kernel."""

import pytest
import torch
from support.tensors import E4M3, E5M2

from recipes.formats.delayed_scaling import update_all

INF, NAN = torch.inf, torch.nan
FP32_MAX = torch.finfo(torch.float32).max


def update(scale, history, amax, *dtypes, algorithm="max"):
    """The state afterwards. dtypes: of each tensor, or one of all."""
    scale, history, amax = scale.clone(), history.clone(), amax.clone()
    mapped_to = torch.tensor([torch.finfo(dtype).max for dtype in dtypes]).expand(len(scale))
    update_all(scale, history, amax, mapped_to, algorithm)
    assert not amax.any()
    return scale, history


def trace(amaxes, length, dtype=E4M3, **settings):
    """The scales of one tensor after each update, and the last history. The state begins as in
    TransformerEngine: scale 1, history 0."""
    scale, history = torch.ones(1), torch.zeros(length, 1)
    scales = []
    for amax in amaxes:
        scale, history = update(scale, history, torch.tensor([amax]), dtype, **settings)
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
        (
            [4, INF, 1, 1, 1],
            3,
            "max",
            [4, 4, 4, 4, 1],
            [0, 1, 1],
        ),  # inf is in force as long as it is remembered
        ([4, INF, 1], 3, "most_recent", [4, 4, 1], [0, INF, 1]),
        ([4, NAN, 1], 4, "max", [4, 4, 4], None),  # fmaxf skips nan
        ([NAN, 2], 4, "max", [448, 2], None),
        ([4, NAN, 1], 4, "most_recent", [4, 4, 1], None),
    ],
)
def test_a_trace(amaxes, length, algorithm, amax_in_force, history):
    """The scale is 448 / (the amax in force); 1 at the start is that of 448."""
    scales, last = trace([float(amax) for amax in amaxes], length, algorithm=algorithm)
    assert scales == [448 / amax for amax in amax_in_force]
    assert history is None or last == history


def test_the_first_scale_is_1_until_a_tensor_was_used():
    assert trace([0.0, 0.0], 4) == ([1.0, 1.0], [0, 0, 0, 0])
    assert trace([INF], 4)[0] == [1.0]


def test_the_format_decides_the_largest_number():
    assert trace([2.0], 4, dtype=E5M2)[0] == [28672.0]
    scale, _ = update(torch.ones(2), torch.zeros(4, 2), torch.tensor([2.0, 2.0]), E4M3, E5M2)
    assert scale.tolist() == [224.0, 28672.0]


def test_a_scale_beyond_fp32_is_its_largest_number():
    assert trace([1e-38], 4)[0] == [FP32_MAX]
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
    scale, history = torch.ones(3), torch.zeros(2, 3)
    new_scale, new_history = update(scale, history, torch.tensor([1.0, 0.0, INF]), E4M3)
    assert new_scale.tolist() == [448, 1, 1]
    assert new_history.tolist() == [[0, 0, 0], [1, 0, INF]]


def test_bad_shapes_are_errors():
    scale, history, amax = torch.ones(2), torch.zeros(4, 2), torch.ones(2)
    for bad in (torch.zeros(0, 2), torch.zeros(4, 3), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"needs scale \(n\), history \(L, n\) with L at least 1"):
            update(scale, bad, amax, E4M3)
    with pytest.raises(ValueError, match=r"got \(2,\), \(4, 2\), \(1,\)"):
        update(scale, history, amax[:1], E4M3)
