"""The comparison of a recipe's kernels at the start of a run, and the timing of its casts."""

import json

import pytest
import torch

from bench import casts
from common.errors import RunError, UserError
from ops import compare_casts as comparison
from ops.recipes import RECIPES
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_comparison_finds_nothing_where_plain_forms_run_twice(recipe):
    assert comparison.compare_casts(recipe, CPU) is None


@pytest.mark.parametrize("function", KERNELS)
def test_a_kernel_that_writes_other_numbers_ends_the_run_with_its_name(function, monkeypatch):
    recipe, message = KERNELS[function]
    spoiled(function, monkeypatch)
    with pytest.raises(RunError) as caught:
        check_kernels(recipe, CPU)
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
        check_kernels("fp8_delayed", CPU)


def test_one_number_that_differs_is_enough(monkeypatch):
    def one(x):
        x = x.clone()
        x[-1, -1] *= 2
        return x

    spoiled("mxfp8_operand", monkeypatch, one)
    assert "(1 of 147,456)" in comparison.compare_casts("mxfp8", CPU)


def test_a_kernel_that_does_not_compile_is_a_reason_not_an_error(monkeypatch):
    def fails(x):
        raise RuntimeError("no such instruction\nptxas trace")

    spoiled("nvfp4_weight", monkeypatch, fails)
    reason = "a kernel failed: RuntimeError: no such instruction"
    assert comparison.compare_casts("nvfp4", CPU) == reason


SMALL = ["config/smoke_qwen3.py", "--device=cpu", "--dtype=bfloat16", "--block_size=32", "--batch_size=1"]


def test_the_casts_of_a_micro_step_are_the_sum_of_its_matrices(monkeypatch, capsys):
    monkeypatch.setattr(casts, "seconds_per_call", lambda call, device: (call(), 1e-3)[1])
    assert casts.main([*SMALL, "--n_layer=2", "--low_precision=nvfp4"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"casts_ms": pytest.approx(2 * 4 * 2)}  # blocks, Linears of each, x and dy


def test_a_recipe_without_emulated_casts_has_none_to_time():
    with pytest.raises(UserError, match="low_precision='fp8_delayed' has no casts.*mxfp8 or nvfp4"):
        casts.main([*SMALL, "--low_precision=fp8_delayed"])
