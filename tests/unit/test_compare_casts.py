"""The comparison of an emulated recipe's kernels at the start of a run."""

import pytest
import torch
from recipes.properties import ALIGNMENTS

from common.errors import RunError
from ops import compare_casts as comparison
from training.optimization.low_precision import check_kernels

CPU = torch.device("cpu")
KERNELS = {  # each kernel that is compared: its recipe, its name in the message
    "mxfp8_operand": ("mxfp8", "'cast' writes other numbers along rows"),
    "nvfp4_amaxes": ("nvfp4", "'amaxes' writes other numbers than"),
    "nvfp4_operand": ("nvfp4", "'cast' writes other numbers along rows"),
    "nvfp4_weight": ("nvfp4", "'cast of a weight' writes other numbers than"),
}


def spoiled(function, monkeypatch, spoil=lambda x: x.roll(1, 0)):
    """After the plain forms, the comparison gets other numbers from the function."""
    right, rounds = getattr(comparison, function), []
    plain = 2 if function == "nvfp4_operand" else 1  # calls of the first round

    def wrong(*arguments):
        rounds.append(arguments)
        found = right(*arguments)
        if len(rounds) <= plain:
            return found
        return tuple(map(spoil, found)) if isinstance(found, tuple) else spoil(found)

    monkeypatch.setattr(comparison, function, wrong)


@pytest.mark.parametrize("recipe", ALIGNMENTS)
def test_the_comparison_finds_nothing_where_plain_forms_run_twice(recipe):
    assert comparison.compare_casts(recipe, CPU, 200) is None


@pytest.mark.parametrize("function", KERNELS)
def test_a_kernel_that_writes_other_numbers_ends_the_run_with_its_name(function, monkeypatch):
    recipe, message = KERNELS[function]
    spoiled(function, monkeypatch)
    with pytest.raises(RunError) as caught:
        check_kernels(recipe, CPU, 200)
    assert f"low_precision='{recipe}' cannot run on this GPU" in str(caught.value)
    assert message in str(caught.value) and "low_precision='none'" in str(caught.value)


@pytest.mark.parametrize("name", ["quantize", "swiglu_backward_float8", "cross_entropy_float8"])
@pytest.mark.parametrize("field", ["rows", "columns"])
def test_a_kernel_that_stores_wrong_fp8_numbers_ends_the_run_at_the_start(name, field, monkeypatch):
    """As ptxas' fault does: right shapes, right magnitudes, numbers of neighbors."""
    right = getattr(comparison, name)

    def wrong(*arguments):
        result = right(*arguments)
        found = result[1] if name == "cross_entropy_float8" else result
        spoilt = found._replace(**{field: getattr(found, field).roll(1, 0)})
        return (result[0], spoilt) if name == "cross_entropy_float8" else spoilt

    monkeypatch.setattr(comparison, name, wrong)
    with pytest.raises(RunError, match="stores wrong fp8 numbers.*low_precision='none'"):
        check_kernels("fp8_delayed", CPU, 200)


def test_kernels_of_the_head_are_compared_only_if_it_computes_in_the_recipe(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("called")

    monkeypatch.setattr(comparison, "cross_entropy_float8", fails)
    assert comparison.compare_casts("fp8_tensorwise", CPU, None) is None
    assert comparison.compare_casts("fp8_tensorwise", CPU, 200) == "a kernel failed: RuntimeError: called"


def test_one_number_that_differs_is_enough(monkeypatch):
    def one(x):
        x = x.clone()
        x[-1, -1] *= 2
        return x

    spoiled("mxfp8_operand", monkeypatch, one)
    assert "(1 of 147,456)" in comparison.compare_casts("mxfp8", CPU, None)


def test_a_kernel_that_does_not_compile_is_a_reason_not_an_error(monkeypatch):
    def fails(x):
        raise RuntimeError("no such instruction\nptxas trace")

    spoiled("nvfp4_weight", monkeypatch, fails)
    reason = "a kernel failed: RuntimeError: no such instruction"
    assert comparison.compare_casts("nvfp4", CPU, None) == reason
