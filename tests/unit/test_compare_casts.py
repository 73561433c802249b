"""The comparison of a recipe's kernels at the start of a run."""

import itertools

import pytest
import torch
from support.all_recipes import BLOCKS, RECIPES, place_of

import recipes.mxfp8
import recipes.nvfp4
from common.errors import RunError
from ops import float8_recipe
from ops.float8_recipe import check_kernels
from ops.linear import Linear
from training.configuration.keys import TrainConfig

CPU = torch.device("cpu")
KERNELS = {  # each kernel that is compared: its recipe, and its words in the message
    "mxfp8_operand": ("mxfp8", "'cast' writes other numbers along rows"),
    "nvfp4_amaxes": ("nvfp4", "'amaxes' writes other numbers than"),
    "nvfp4_operand": ("nvfp4", "'cast' writes other numbers along rows"),
    "nvfp4_weight": ("nvfp4", "'cast of a weight' writes other numbers than"),
}


def spoiled(function, monkeypatch, spoil=lambda x: x.roll(1, 0)):
    """After the plain forms, the comparison gets other numbers from the function."""
    module = recipes.mxfp8 if function == "mxfp8_operand" else recipes.nvfp4
    right, calls = getattr(module, function), itertools.count()
    plain = 2 if function == "nvfp4_operand" else 1  # calls of the first round

    def wrong(*arguments):
        found = right(*arguments)
        if next(calls) < plain:
            return found
        return tuple(map(spoil, found)) if isinstance(found, tuple) else spoil(found)

    monkeypatch.setattr(module, function, wrong)


def compare(recipe, vocab_size=200):
    """What a run compares that starts on a GPU."""
    if recipe in BLOCKS:
        return BLOCKS[recipe].compare_casts(CPU)
    return float8_recipe.compare_float8(CPU, vocab_size)


def check(recipe, vocab_size=200):
    check_kernels(recipe, lambda: compare(recipe, vocab_size))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_comparison_finds_nothing_where_plain_forms_run_twice(recipe):
    assert compare(recipe) is None
    check(recipe)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "mxfp8"])  # which keep no state on a GPU
@pytest.mark.parametrize("in_head", [False, True])
def test_a_recipe_on_a_gpu_compares_its_kernels_before_it_gives_a_layer_away(monkeypatch, recipe, in_head):
    """Of the head, whose kernels depend on its width, with this width."""
    kind, seen = RECIPES[recipe], []
    layers, head = {"blocks.0.ffn.up": Linear(64, 96)}, {"head.lm_head": Linear(64, 160)} if in_head else {}
    place = place_of()._replace(device=torch.device("cuda"))

    def wrong(*arguments):
        seen.append(arguments)
        return "its kernel stores other numbers"

    if recipe in BLOCKS:
        monkeypatch.setattr(kind, "compare_casts", staticmethod(wrong))
    else:
        monkeypatch.setattr(float8_recipe, "compare_float8", wrong)
    monkeypatch.setattr(kind, "convert", lambda *_: pytest.fail("a layer was converted"))
    with pytest.raises(RunError, match=f"low_precision='{recipe}' cannot run .* stores other numbers"):
        kind(TrainConfig(low_precision=recipe), layers, head, place)
    expected = (place.device,) if recipe in BLOCKS else (place.device, 160 if in_head else None)
    assert seen == [expected]


@pytest.mark.parametrize("function", KERNELS)
def test_a_kernel_that_writes_other_numbers_ends_the_run_with_its_name(function, monkeypatch):
    recipe, message = KERNELS[function]
    spoiled(function, monkeypatch)
    with pytest.raises(RunError, match=f"low_precision='{recipe}' cannot run on this GPU") as caught:
        check(recipe)
    assert message in str(caught.value) and "low_precision='none'" in str(caught.value)


@pytest.mark.parametrize("name", ["quantize", "swiglu_backward_float8", "cross_entropy_float8"])
@pytest.mark.parametrize("field", ["rows", "columns"])
def test_a_kernel_that_stores_wrong_fp8_numbers_ends_the_run_at_the_start(name, field, monkeypatch):
    """As ptxas' fault does: right shapes, right magnitudes, numbers of neighbors."""
    right = getattr(float8_recipe, name)

    def wrong(*arguments):
        result = right(*arguments)
        found = result[1] if name == "cross_entropy_float8" else result
        spoilt = found._replace(**{field: getattr(found, field).roll(1, 0)})
        return (result[0], spoilt) if name == "cross_entropy_float8" else spoilt

    monkeypatch.setattr(float8_recipe, name, wrong)
    with pytest.raises(RunError, match="stores wrong fp8 numbers.*low_precision='none'"):
        check("fp8_delayed")


def test_kernels_of_the_head_are_compared_only_if_it_computes_in_the_recipe(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("called")

    monkeypatch.setattr(float8_recipe, "cross_entropy_float8", fails)
    check("fp8_tensorwise", None)
    with pytest.raises(RunError, match="a kernel failed: RuntimeError: called"):
        check("fp8_tensorwise", 200)


def test_one_number_that_differs_is_enough_and_a_kernel_that_does_not_compile_ends_the_run(monkeypatch):
    def one(x):
        x = x.clone()
        x[-1, -1] *= 2
        return x

    def fails(x):
        raise RuntimeError("no such instruction\nptxas trace")

    spoiled("mxfp8_operand", monkeypatch, one)
    assert "(1 of 147,456)" in compare("mxfp8")
    spoiled("nvfp4_weight", monkeypatch, fails)
    with pytest.raises(RunError, match="a kernel failed: RuntimeError: no such instruction;"):
        check("nvfp4")
