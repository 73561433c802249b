"""A Linear, a model and a run in each recipe of low precision: what is computed, and that it trains."""

import functools
import operator
import sys
import types

import pytest
import torch
from support.all_recipes import BLOCKS, RECIPES, recipe_of, use_recipe
from support.helpers import TINY, checkpoint_tensors, last_run, make_dataset, run_in_one_launch, write_config
from support.tensors import E4M3, E5M2, error, random_bf16

from model_builder import build_model
from model_config import model_config
from ops.activation import Activation
from ops.cross_entropy import LinearCrossEntropy
from ops.linear import InPlaceOf, Linear, refresh_weights
from ops.quantization.random_bits import random_key
from ops.recipe import Recipe
from recipes.formats import mxfp8, nvfp4
from recipes.formats.hadamard import random_hadamard
from recipes.nvfp4_linear import bits_of_operand
from training.configuration.keys import TrainConfig
from training.optimization.low_precision import low_precision_layers, low_precision_line
from training.optimization.low_precision import use_recipe as use_low_precision

BY_AMAX = ("fp8_tensorwise", "nvfp4")  # all rows of a matrix share its largest magnitude
M, K, N = 128, 256, 128


def low_linear(recipe, key=None, bias=False, dtype=E5M2):
    layer = Linear(K, N, bias=bias)
    layer.weight.data = random_bf16(N, K, std=0.05)
    return use_recipe(layer, recipe, key, dtype)


def forms_of(recipe, matrix, weight=False, key=None):
    """A matrix as the recipe's rows and columns, from recipes/formats alone."""
    if recipe == "mxfp8":
        blocks = mxfp8.ALONG_ROWS, mxfp8.ALONG_COLUMNS
        return [mxfp8.dequantize(mxfp8.quantize(matrix, block)) for block in blocks]
    if weight:
        return [nvfp4.dequantize(nvfp4.quantize(matrix, nvfp4.SQUARE))] * 2
    forms = [(matrix, nvfp4.ALONG_ROWS), (random_hadamard(matrix, dim=0), nvfp4.ALONG_COLUMNS)]
    streams = [None if key is None else bits_of_operand(matrix, key, stream) for stream in (0, 1)]
    return [
        nvfp4.dequantize(nvfp4.quantize(form, block, form.abs().amax().float(), bits))
        for (form, block), bits in zip(forms, streams, strict=True)
    ]


# --- a Linear ---


@pytest.mark.parametrize("recipe", BLOCKS)
def test_the_three_matmuls_of_a_linear_have_the_operands_of_the_recipe(recipe):
    key = random_key(seed=5, iteration=3, micro_step=1, tensor=7)
    layer = low_linear(recipe, key)
    x = random_bf16(M, K)
    dy = (random_bf16(M, N) * torch.logspace(-12, 0, M)[:, None]).bfloat16()  # blocks of rows of many sizes
    layer.weight_grad = torch.zeros(N, K)
    start = x.clone().requires_grad_()
    y = layer(start)
    y.backward(dy)
    w = layer.weight.detach()
    x_rows, x_columns = forms_of(recipe, x)
    w_rows, w_columns = forms_of(recipe, w, weight=True)
    dy_rows, dy_columns = forms_of(recipe, dy, key=key)
    assert torch.equal(y, x_rows @ w_rows.t())
    assert torch.equal(start.grad, dy_rows @ w_columns)
    assert torch.equal(layer.weight_grad, dy_columns.float().t() @ x_columns.float())
    # the whole tells that nothing is left out: an NVFP4 matmul is about 14 % off, an MXFP8 one 4 %
    assert error(y, x.float() @ w.float().t()) < (0.2 if recipe == "nvfp4" else 0.06)
    assert error(layer.weight_grad, dy.float().t() @ x.float()) < (0.25 if recipe == "nvfp4" else 0.06)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", *BLOCKS])
@pytest.mark.parametrize("bias", [False, True])
def test_without_a_sum_autograd_gets_the_weights_gradient(recipe, bias):
    key = random_key(seed=1)
    summed, plain = (low_linear(recipe, key, bias) for _ in range(2))
    if bias:
        summed.bias.data = plain.bias.data = random_bf16(N)
    summed.weight_grad = torch.zeros(N, K)
    x, dy = random_bf16(M, K), random_bf16(M, N)
    y = [layer(x) for layer in (summed, plain)]
    assert torch.equal(*y)
    for each in y:
        each.backward(dy)
    assert summed.weight.grad is None
    assert error(plain.weight.grad, summed.weight_grad) < 0.01  # bf16 against fp32


def test_random_bits_are_read_when_the_backward_runs_also_by_compiled_code():
    key = random_key(seed=1)
    layer = low_linear("nvfp4", key)
    layer.weight_grad = torch.zeros(N, K)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, dy = random_bf16(M, K), random_bf16(M, N)

    def input_gradient(layer, iteration):
        key[1] = iteration
        start = x.clone().requires_grad_()
        layer(start).backward(dy)
        return start.grad

    first, second, again = (input_gradient(compiled, iteration) for iteration in (0, 1, 0))
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(first, input_gradient(layer, 0)) and torch.equal(second, input_gradient(layer, 1))


def test_random_bits_are_those_of_an_iteration_of_its_micro_step_of_a_layer_and_of_a_seed():
    recipe, found = recipe_of("nvfp4", Linear(32, 32), Linear(32, 32)), []
    for last in (False, True, False, True):
        recipe.before_micro_step()
        found.append(recipe.linears["1"].key[1:3].tolist())
        recipe.after_micro_step(torch.zeros(()), last)
    assert found == [[0, 0], [0, 1], [1, 0], [1, 1]]
    keys = [recipe_of("nvfp4", *[Linear(32, 32)] * 2, seed=seed).keys for seed in (1, 2, 1)]
    assert torch.equal(keys[0], keys[2])
    assert len({tuple(key.tolist()) for key in torch.cat(keys[:2])}) == 4


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_improbable_id_is_still_pushed_down(recipe, dtype):
    """Whatever fp8_gradients says. Half of the ids have a probability of about 1e-7."""
    x, weight = random_bf16(M, K, std=0.1), random_bf16(N, K, std=0.01)
    x[:, 0], weight[:, 0], weight[N // 2 :, 0] = 4.0, 0.0, -3.0
    targets = torch.arange(M) % 32
    exact = weight.float().requires_grad_()
    logits = x.float() @ exact.t()
    assert 1e-8 < logits.softmax(-1)[:, N // 2 :].max() < 2e-7
    torch.nn.functional.cross_entropy(logits, targets).backward()
    layer, found = low_linear(recipe, random_key(3), dtype=dtype), weight.clone().requires_grad_()
    layer.weight.data = weight
    refresh_weights(layer)
    LinearCrossEntropy.apply(x, found, targets, layer, 2, True, None).backward()
    pushed, wanted = (w.grad[N // 2 :, 0].float() for w in (found, exact))
    assert (pushed > 0).all() and error(pushed, wanted) < 0.3


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", *BLOCKS])
def test_parts_of_the_head_have_the_gradients_of_the_whole(recipe):
    """The same tokens in two parts."""
    layer = low_linear(recipe, random_key(seed=3))
    half = random_bf16(M, K)
    x, targets = torch.cat((half, half)).requires_grad_(), (torch.arange(2 * M) % M)
    LinearCrossEntropy.apply(x, random_bf16(N, K), targets, layer, 2, True, None).backward()
    first, second = x.grad.chunk(2)
    assert torch.equal(first, second)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", *BLOCKS])
def test_an_evaluation_may_have_any_number_of_tokens(recipe):
    layer = low_linear(recipe)
    x = random_bf16(M, K)
    with torch.no_grad():
        if recipe not in BY_AMAX:  # blocks lie inside of a row
            assert torch.equal(layer(x[:37]), layer(x)[:37])
        else:
            largest = x.abs().amax(1).argmax()
            rows = torch.cat((x[largest : largest + 1], x[:20]))
            assert torch.equal(layer(rows)[1:], layer(x)[:20])


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", *BLOCKS])
def test_weights_are_quantized_where_they_are(recipe):
    layer = low_linear(recipe)
    before = {form: copy.clone() for form, copy in layer.copies().items()}
    addresses = {form: copy.data_ptr() for form, copy in layer.copies().items()}
    assert (addresses["rows"] == addresses["columns"]) == (recipe == "nvfp4"), "squares are kept once"
    layer.weight.data = random_bf16(N, K, std=3.0)
    refresh_weights(layer)
    assert {form: copy.data_ptr() for form, copy in layer.copies().items()} == addresses
    assert not any(torch.equal(copy, before[form]) for form, copy in layer.copies().items())


# --- runs ---

# with both kinds of weight gradients in a block and in the head, several parts of logits, accumulation
KEYS = TINY | {
    "dtype": "bfloat16",
    "n_embd": 128,  # widths and tokens that all recipes can have
    "d_ff": 128,
    "vocab_size": 128,
    "block_size": 64,
    "batch_size": 2,
    "learning_rate": 2e-3,
    "gradient_accumulation_steps": 2,
    "max_iters": 4,
    "eval_interval": 2,
    "eval_iters": 1,
    "log_interval": 1,
    "low_precision_scope": "layers_and_head",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("low-precision")
    make_dataset(folder / "data", vocab_size=128)
    return folder


def records(folder, runs: dict[str, dict], processes=1) -> list[dict]:
    """Of runs in folders of these names' first words, by the same processes one after another."""
    commands = []
    for name, keys in runs.items():
        path = folder / f"{name.replace(' ', '-')}.py"
        config = write_config(path, **{**KEYS, "dataset": folder / "data", **keys})
        commands.append([config, f"--out_dir={folder / name.split()[0]}"])
    run_in_one_launch(folder, commands, processes)
    return [last_run(folder / name.split()[0]) for name in runs]


def losses(record):
    return [row["loss"] for row in record["training_iterations"]]


def test_every_recipe_trains_on_a_cpu_and_follows_bf16(folder):
    keys = {"max_iters": 24, "log_interval": 8, "eval_interval": 0, "low_precision_scope": "layers"}
    keys["gradient_accumulation_steps"] = 1
    found = records(folder, {name: keys | {"low_precision": name} for name in ("none", *RECIPES)})
    bf16, *others = map(losses, found)
    assert bf16[-1] < 0.8 * bf16[0]
    for low, bound in zip(others, (0.03, 0.03, 0.03, 0.05), strict=True):
        assert low[0] != bf16[0] and low[0] == pytest.approx(bf16[0], rel=1e-2)
        assert low[1:] == pytest.approx(bf16[1:], rel=bound)


STRATEGIES = {
    "ddp": {},
    "zero1": {"use_zero1": True},
    "fsdp": {"use_fsdp": True, "reshard_after_forward": True},
    "recomputed": {"activation_checkpointing": "full"},
}
# A recomputed block and a resumed run must find what a recipe keeps: random bits, and scales of the past. The
# other recipes keep nothing, they are functions of the matrix alone: mxfp8 stands for both.
WITH_STATE = ("nvfp4", "fp8_delayed")
COVERING = (*WITH_STATE, "mxfp8")


@pytest.fixture(scope="module")
def trained_by(folder):
    """trained_by(processes): {(strategy, recipe): its losses} with the same sequences an iteration."""

    @functools.cache
    def trained(processes: int) -> dict[tuple[str, str], list[float]]:
        one = {("one", recipe): {"gradient_accumulation_steps": 4} for recipe in RECIPES}
        two = {
            (name, recipe): keys
            for recipe in RECIPES
            for name, keys in STRATEGIES.items()
            if name in ("ddp", "fsdp") or recipe in COVERING
        }
        runs = one if processes == 1 else two
        named = {f"{name}-{kind}": keys | {"low_precision": kind} for (name, kind), keys in runs.items()}
        return dict(zip(runs, map(losses, records(folder, named, processes)), strict=True))

    return trained


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_strategy_trains_like_one_process(trained_by, recipe):
    alone = trained_by(1)["one", recipe]
    found = {name: of for (name, its), of in trained_by(2).items() if its == recipe}
    for each in found.values():
        assert each == pytest.approx(alone, rel=0.02)
    if recipe in COVERING:
        ddp, zero1 = found["ddp"], found["zero1"]
        assert zero1[:2] == ddp[:2]  # then the gradient norm, summed in another order, is another one
        assert zero1 == pytest.approx(ddp, rel=5e-3)


@pytest.mark.parametrize("recipe", COVERING)
def test_a_recomputed_block_has_the_random_bits_and_the_scales_of_its_forward(trained_by, recipe):
    assert trained_by(2)["recomputed", recipe] == trained_by(2)["ddp", recipe]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_resumes_bit_equal(folder, trained_by, processes):
    strategy, keys, recipes = {
        1: ("one", {"gradient_accumulation_steps": 4}, COVERING),
        2: ("fsdp", STRATEGIES["fsdp"], WITH_STATE),
    }[processes]
    runs = {}
    for recipe in recipes:
        part = f"part-{recipe}-{processes}"
        runs[f"{part} begun"] = keys | {"low_precision": recipe, "max_iters": 2}
        runs[f"{part} resumed"] = keys | {"low_precision": recipe, "init_from": "resume"}
    resumed = map(losses, records(folder, runs, processes)[1::2])  # they begin with the first part's rows
    whole = trained_by(processes)
    assert dict(zip(recipes, resumed, strict=True)) == {recipe: whole[strategy, recipe] for recipe in recipes}


SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 96, "block_size": 32}


def test_a_recipe_from_outside_is_called_with_every_linear_and_its_path(monkeypatch):
    class Doubled(InPlaceOf):
        def project(self, x, tells_amax=False):
            return Activation(2 * torch.nn.functional.linear(x.value, self.weight))

    class Stranger(Recipe):
        def convert(self, layer, number, in_head):
            seen.append((number, layer, in_head))
            return Doubled(layer) if number % 2 else layer

    monkeypatch.setitem(sys.modules, "strangers.recipe", types.SimpleNamespace(RECIPE=Stranger))
    config = TrainConfig(low_precision="strangers.recipe", low_precision_scope="layers_and_head", **SHAPE)
    model, seen = build_model(model_config("qwen3", **SHAPE)).init_weights("cpu", seed=0), []
    before = {path: one for path, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    names, weights = list(model.state_dict()), list(model.parameters())
    recipe = use_low_precision(model, config)
    in_head = [path == "head.lm_head" for path in before]
    assert seen == list(zip(range(2 * 4 + 1), before.values(), in_head, strict=True))
    assert list(recipe.linears) == list(before)
    for i, (path, one) in enumerate(recipe.linears.items()):
        assert model.get_submodule(path) is one and (type(one) is Doubled) == i % 2
    assert list(model.state_dict()) == names and all(map(operator.is_, model.parameters(), weights))


@pytest.mark.parametrize(
    ("first", "last", "scope", "blocks"),
    [(1, 0, "layers", {1, 2, 3}), (0, 2, "layers_and_head", {0, 1}), (2, 1, "layers", {2})],
)
def test_first_and_last_blocks_stay_in_bf16(first, last, scope, blocks):
    shape = {**SHAPE, "n_layer": 4}
    keys = {"low_precision_skip_first": first, "low_precision_skip_last": last, "low_precision_scope": scope}
    config = TrainConfig(low_precision="mxfp8", **keys, **shape)
    layers, head = low_precision_layers(build_model(model_config("qwen3", **shape)), config)
    ends = " and ".join(f"{name} {n} blocks" for name, n in (("first", first), ("last", last)) if n)
    assert low_precision_line(config, "so") == f"mxfp8 matmuls in {scope} but the {ends} (so)"
    assert {int(path.split(".")[1]) for path in layers} == blocks
    assert all(path.startswith("blocks.") for path in layers)
    assert list(head) == (["head.lm_head"] if scope == "layers_and_head" else [])


def test_delayed_scales_come_from_the_steps_before_and_are_saved(folder):
    keys = {"low_precision": "fp8_delayed", "amax_history": 4, "max_iters": 5, "eval_interval": 2}
    records(folder, {"delayed": keys})
    saved = checkpoint_tensors(max((folder / "delayed" / "checkpoints").glob("step-*")))
    layers = 4 * TINY["n_layer"] + 1
    scale, history = (saved[f"low_precision.{name}"] for name in ("scale", "history"))
    assert scale.shape == (3 * layers,) and history.shape == (4, 3 * layers)
    assert (scale[:-1] > 0).all() and (history[0] == 0).all()
    # rows: x, w, dy, whose numbers are e4m3, e4m3, e5m2
    largest = torch.tensor([448.0, 448.0, 57344.0])[:, None]
    x, w, dy = history.view(4, 3, -1)[1:].amax(0) * scale.view(3, -1) / largest
    one = 1 + 1e-6  # a quotient is rounded
    assert (x <= one).all() and (x > 0.2).all()  # the largest of the last 4 may have left the history
    # the head's gradient has a scale of its own, because no probability is above 1
    assert (dy[:-1] <= one).all() and (dy[:-1] > 0.01).all() and (w <= one).all() and (w > 0.9).all()


def test_what_an_evaluation_has_found_scales_no_iteration():
    """The weights' largest magnitudes are of the last update, and stay."""
    recipe = recipe_of("fp8_delayed", Linear(16, 16), Linear(16, 16), amax_history=2)
    recipe.amax.fill_(5.0)
    recipe.before_iteration()
    assert recipe.amax.view(3, 2).tolist() == [[0, 0], [5, 5], [0, 0]]


def test_an_overflow_that_fp8_would_hide_skips_the_update():
    state = recipe_of("fp8_delayed", Linear(16, 16), amax_history=2)
    layer = state.linears["0"]
    matrix, loss = random_bf16(16, 16), torch.tensor(1.5)
    for overflow in (False, True, False):
        state.before_iteration()
        layer.quantize_input(matrix, None)
        gradient = matrix.index_fill(0, torch.tensor(3), torch.inf) if overflow else matrix
        values = layer.quantize_gradient(gradient, None).rows
        before = state.scale.clone()
        result = state.after_micro_step(loss, last=True)
        assert result.isnan() == overflow and (overflow or result == loss)
        if overflow:
            assert values.float().isfinite().all()  # it does not show
            assert torch.equal(state.scale[[0, 2]], before[[0, 2]]) and state.history.isfinite().all()


# --- bad input ---


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--low_precision=mxfp8", "--d_ff=144"], ["multiples of 32", "blocks.0.ffn.down", "d_ff"]),
        (["--low_precision=mxfp8", "--block_size=24"], ["multiple of 32 tokens", "is 48", "block_size"]),
        (["--low_precision=fp8_tensorwise", "--head_dim=6"], ["multiples of 16", "blocks.0.attn.out"]),
        (["--low_precision=fp8_tensorwise", "--loss_chunks=4", "--block_size=8"],
         ["multiple of 16 tokens", "in 4 loss_chunks"]),
        (["--low_precision=nvfp4", "--low_precision_skip_first=1", "--low_precision_skip_last=1",
          "--low_precision_scope=layers", "--n_layer=2"],
         ["low_precision_skip_first=1", "low_precision_skip_last=1", "n_layer=2", "nvfp4"]),
        (["--low_precision=nvfp4", "--fp8_gradients=e4m3"], ["fp8_gradients='e4m3'", "'nvfp4'"]),
        (["--low_precision_skip_last=1"], ["low_precision_skip_last=1", "low_precision='none'"]),
        (["--low_precision=fp8_blockwise"], ["was removed", "use 'fp8_tensorwise'"]),
        (["--amax_history=16"], ["amax_history=16", "low_precision='none'", "fp8_delayed"]),
        (["--low_precision=mxfp8", "--amax_algorithm=most_recent"], ["amax_algorithm", "'mxfp8'"]),
        (["--low_precision=nvfp4", "--dtype=float32"], ["nvfp4", "float32"]),
        (["--low_precision=mxfp4"], ["mxfp4", "mxfp8"]),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_an_error_that_names_them(folder, run, capsys, flags, words):
    config = write_config(folder / "bad.py", **{**KEYS, "dataset": folder / "data"})
    assert run(config, f"--out_dir={folder / 'bad'}", *flags) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said, said


def test_a_resume_in_another_recipe_is_refused_unless_it_is_allowed(folder, run, capsys):
    keys = {**KEYS, "dataset": folder / "data", "out_dir": folder / "first", "eval_interval": 0}
    config = write_config(folder / "first.py", **keys | {"low_precision_skip_last": 1, "max_iters": 3})
    assert run(config, "--low_precision=mxfp8", "--max_iters=2") == 0
    other = [config, "--init_from=resume", "--low_precision=nvfp4"]
    assert run(*other) == 2
    assert "low_precision: checkpoint mxfp8, now nvfp4" in capsys.readouterr().err
    assert run(*other, "--allow_changes=low_precision") == 0
