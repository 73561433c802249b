"""mxfp8 and nvfp4 by matmuls of scaled blocks: the layout of scales, operands, products, and the check that
switches them on. Stand-ins multiply, as no CPU does (support/scaled_matmuls.py)."""

import math

import pytest
import torch
import torch.nn.functional as F
from support import scaled_matmuls
from support.all_recipes import BLOCKS, EMULATED, SCALED
from support.helpers import TINY, last_run, make_dataset, run_in_one_launch, write_config
from support.scaled_matmuls import decode
from support.tensors import random_bf16

from ops.linear import Linear, refresh_weights
from ops.quantization.random_bits import random_key
from recipes import block_recipe, block_scaled
from recipes.block_scaled import block_forms
from recipes.block_scaled_check import find_difference
from recipes.formats.scale_layout import from_tiles, tiles, to_tiles
from recipes.mxfp8 import mxfp8_operand
from recipes.nvfp4_linear import nvfp4_amaxes, nvfp4_operand, nvfp4_weight
from training.configuration.keys import TrainConfig
from training.hardware.peaks import FORMATS
from training.memory.estimate import estimate_memory

RECIPES = tuple(BLOCKS)
KEY = random_key(seed=5, iteration=3, micro_step=1, tensor=7)
M, K, N = 96, 160, 224  # no multiple of a tile of scales


@pytest.fixture
def multiplied_by(monkeypatch):
    return lambda stand_in: scaled_matmuls.use(monkeypatch.setattr, stand_in)


# --- layout ---


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (96, 3), (130, 9), (300, 17), (256, 8)])
def test_scales_have_the_layout_of_torchaos_to_blocked(shape):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    ordered = to_tiles(scales)
    assert torch.equal(ordered, utils.to_blocked(scales).flatten())
    assert len(ordered) == 512 * math.prod(tiles(*shape))
    assert torch.equal(from_tiles(ordered, *shape), scales)


def test_an_operand_is_the_emulations_with_the_summed_dimension_contiguous():
    x = (random_bf16(M, K) * torch.logspace(-9, 3, K)).bfloat16()
    amaxes = nvfp4_amaxes(x)
    weight = nvfp4_weight(x, amaxes[0])
    for forms, expected in (
        (block_forms(x), mxfp8_operand(x)),
        (block_forms(x, amaxes), nvfp4_operand(x, amaxes)),
        (block_forms(x, amaxes, KEY), nvfp4_operand(x, amaxes, KEY)),
        (block_forms(x, amaxes[:1]), (weight, weight)),
    ):
        rows, columns, scales, column_scales = forms
        assert torch.equal(decode(rows, scales), expected[0])
        assert torch.equal(decode(columns, column_scales), expected[1].t())
        assert rows.is_contiguous() and columns.is_contiguous()


def test_of_two_fp4_codes_in_a_byte_the_first_one_is_in_the_low_half():
    x = torch.zeros(16, 32)
    x[:, 0], x[:, 1] = 6.0, -0.5  # codes 7 and 9
    rows = block_forms(x.bfloat16(), nvfp4_amaxes(x.bfloat16()))[0]
    assert rows.shape == (16, 16) and (rows[:, 0] == 0x97).all() and (rows[:, 1:] == 0).all()


@pytest.mark.parametrize(("module", "name"), [(F, "scaled_mm"), (torch, "_scaled_mm")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_gets_row_major_times_column_major_and_scales_in_their_dtypes(
    monkeypatch, recipe, module, name
):
    given = {}

    def record(a, b, *scales, **options):
        given.update(a=a, b=b, scales=scales, options=options)
        return torch.ones(len(a), b.shape[1], dtype=torch.bfloat16)

    if module is torch:
        monkeypatch.delattr(F, "scaled_mm")
    monkeypatch.setattr(module, name, record)
    layer, fp4 = layer_of(recipe, SCALED), recipe == "nvfp4"
    x, weight = layer.quantize(random_bf16(M, K)), layer.quantized
    product = block_scaled.scaled_mm(x.rows, x.scales, weight.rows, weight.scales, torch.bfloat16)
    assert given["a"].dtype == (torch.float4_e2m1fn_x2 if fp4 else torch.float8_e4m3fn)
    assert given["a"].stride(1) == given["b"].stride(0) == 1 and given["b"].shape == (K // (1 + fp4), N)
    scales = [one for each in given["scales"] for one in (each if isinstance(each, list) else [each])]
    tensors = [one for one in scales if isinstance(one, torch.Tensor)]
    blocks = [one for one in tensors if one.ndim == 1]
    assert {one.dtype for one in blocks} == {torch.float8_e4m3fn if fp4 else torch.float8_e8m0fnu}
    sizes = [512 * math.prod(tiles(rows, K // (16 if fp4 else 32))) for rows in (M, N)]
    assert [len(one) for one in blocks] == sizes
    factors = [one.scales[-4:].view(torch.float32).item() for one in (x, weight)] if fp4 else [1.0, 1.0]
    if module is torch:  # whose function takes no global factors
        assert (product == torch.tensor(factors[0] * factors[1]).bfloat16()).all()
    elif fp4:
        assert [one.item() for one in tensors if one.ndim == 0] == factors


def test_the_installed_torch_has_an_entry_point_which_no_cpu_runs_and_without_one_a_run_emulates(monkeypatch):
    """Where this fails, torch has moved or renamed its matmul of scaled blocks: change scaled_mm() in
    recipes/block_scaled.py. Until then, runs on Blackwell emulate, and say so."""
    for recipe in RECIPES:
        found = find_difference(SCALED[recipe], EMULATED[recipe], (64, 32), 5024, KEY)
        assert found.startswith("4,096 tokens, weight 64 x 32: ValueError: CPU does not support"), found
    for module, function in ((F, "scaled_mm"), (torch, "_scaled_mm")):
        assert hasattr(module, function), (function, torch.__version__)
        monkeypatch.delattr(module, function)
    found = find_difference(SCALED["mxfp8"], EMULATED["mxfp8"], (N, K), M, KEY)
    assert "AttributeError: module 'torch' has no attribute '_scaled_mm'" in found


# --- a Linear ---


def layer_of(recipe, kinds, summed=False):
    layer = Linear(K, N, bias=False)
    layer.weight.data = random_bf16(N, K, std=0.05)
    low = kinds[recipe](layer, KEY)
    low.weight_grad = torch.zeros(N, K) if summed else None
    refresh_weights(low)
    return low


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_the_emulation(multiplied_by, recipe, summed):
    multiplied_by(scaled_matmuls.emulating)
    dy, made = random_bf16(M, N), []
    for kinds in (SCALED, EMULATED):
        layer, x = layer_of(recipe, kinds, summed), random_bf16(M, K).requires_grad_()
        y = layer(x)
        y.backward(dy)
        made.append((y, x.grad, layer.weight_grad if summed else layer.weight.grad))
    for ours, plain in zip(*made, strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_code_is_one_graph_with_the_same_results(multiplied_by, recipe):
    multiplied_by(scaled_matmuls.exact)
    layer, dy, made = layer_of(recipe, SCALED, summed=True), random_bf16(M, N), []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.weight_grad.zero_()
        x = random_bf16(M, K).requires_grad_()
        function(x).backward(dy)
        made.append((x.grad, layer.weight_grad.clone()))
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_quantized_where_they_are_and_an_evaluation_may_have_any_number_of_tokens(
    multiplied_by, recipe
):
    multiplied_by(scaled_matmuls.exact)
    layer = layer_of(recipe, SCALED)
    addresses = [form.data_ptr() for form in layer.quantized]
    layer.weight.data = random_bf16(N, K, std=3.0)
    refresh_weights(layer)
    assert [form.data_ptr() for form in layer.quantized] == addresses
    with torch.no_grad():
        assert layer(random_bf16(37, K)).shape == (37, N)


# --- the check at the start ---


@pytest.mark.parametrize(("sides", "tokens"), [((64, 32), 5024), ((224, 160), 64), ((512, 256), 64)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_computes_like_tensor_cores_passes(multiplied_by, recipe, sides, tokens):
    multiplied_by(scaled_matmuls.exact)
    assert find_difference(SCALED[recipe], EMULATED[recipe], sides, tokens, KEY) is None


@pytest.mark.parametrize(("tokens", "runs"), [(96, True), (80, False), (4128, True), (4112, False)])
def test_tokens_that_nvfp4_can_only_emulate_fail_the_check(multiplied_by, tokens, runs):
    """The emulation takes multiples of 16 tokens, torch's matmul of two codes a byte multiples of 32."""
    multiplied_by(scaled_matmuls.exact)
    found = find_difference(SCALED["nvfp4"], EMULATED["nvfp4"], (64, 32), tokens, KEY)
    assert found == (None if runs else f"{tokens:,} tokens are no multiple of 32")


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_wrong_scale_or_code_is_found(multiplied_by, monkeypatch, recipe):
    kinds = SCALED[recipe], EMULATED[recipe]
    multiplied_by(scaled_matmuls.wrong_scale)
    assert "forward is off by " in find_difference(*kinds, (N, K), M, KEY)
    multiplied_by(scaled_matmuls.exact)
    quantize = kinds[0].quantize_gradient

    def one_other_code(self, dy):
        operand = quantize(self, dy)
        operand.columns.view(torch.uint8)[-1, 4] ^= 1
        return operand

    monkeypatch.setattr(kinds[0], "quantize_gradient", one_other_code)
    found = find_difference(*kinds, (N, K), M, KEY)
    assert found == "96 tokens, weight 224 x 160: the columns of dy have other numbers (1 of 21,504)"


# --- runs ---

KEYS = TINY | {"dtype": "bfloat16", "n_embd": 64, "d_ff": 96, "batch_size": 2, "vocab_size": 96}


@pytest.fixture
def trained(run, tmp_path):
    """trained(name, **keys): the record and the log of a run in one process."""
    dataset = make_dataset(tmp_path / "data", vocab_size=96)

    def trained(name, **keys):
        config = write_config(tmp_path / f"{name}.py", **{**KEYS, "dataset": dataset, **keys})
        assert run(config, f"--out_dir={tmp_path / name}") == 0
        return last_run(tmp_path / name), next((tmp_path / name).glob("run_*.log")).read_text()

    return trained


def losses(record):
    return [row["loss"] for row in record["training_iterations"]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_has_the_losses_of_the_emulation(trained, multiplied_by, monkeypatch, recipe):
    keys = {"low_precision": recipe, "low_precision_scope": "layers_and_head"}
    keys |= {"gradient_accumulation_steps": 2}
    plain, _ = trained("emulated", **keys)
    multiplied_by(scaled_matmuls.emulating)
    if recipe == "nvfp4":  # the emulation rounds global factors into its operands, which the check forbids
        monkeypatch.setattr(block_recipe, "find_difference", lambda *arguments: None)
    ours, log = trained("native", **keys)
    assert losses(ours) == losses(plain)
    said = ours["startup_info"]["low_precision"]
    emulated_head = ", but the head: bf16" if recipe == "nvfp4" else ""
    assert said["executed"] == f"native {recipe}{emulated_head}" and said["native"] is True
    assert f"(native {recipe}{emulated_head})" in log and "emulate" not in log


WRONG = "64 tokens, weight 64 x 64: forward is off by "
FAILING = "64 tokens, weight 64 x 64: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("recipe", "stand_in", "counted", "reason"),
    [
        ("mxfp8", scaled_matmuls.exact, {"fp8": 4500}, None),
        ("nvfp4", scaled_matmuls.exact, {"fp4": 9000}, None),
        ("mxfp8", scaled_matmuls.wrong_scale, {}, WRONG),
        ("nvfp4", scaled_matmuls.failing, {}, FAILING),
    ],
)
def test_a_run_counts_against_the_peak_of_its_format_if_the_check_switched_it_on_and_else_emulates(
    trained, multiplied_by, recipe, stand_in, counted, reason
):
    plain = trained("emulated", low_precision=recipe)[0] if reason else None
    multiplied_by(stand_in)
    record, log = trained("counted", low_precision=recipe)
    executed = record["startup_info"]["low_precision"]["executed"]
    if reason:  # which one line says
        assert losses(record) == losses(plain)
        assert executed.startswith(f"bf16, emulates {recipe} (check failed: rank 0: {reason}")
        (line,) = (line for line in log.splitlines() if "the check at the start failed" in line)
        assert reason in line and f"(NVIDIA B200, torch {torch.__version__}, CUDA" in line
    else:
        assert losses(record)[-1] < losses(record)[0]
        assert executed == f"native {recipe}"
    hardware = record["startup_info"]["hardware"]
    assert hardware["peak"]["tflops_per_gpu"] == 2250
    stated = {name: hardware.get(f"peak_{name}", {}).get("tflops_per_gpu") for name in FORMATS}
    assert stated == dict.fromkeys(FORMATS) | counted
    for mfu in filter(None, (row["mfu"] for row in record["training_iterations"])):
        for name in FORMATS:
            expected = pytest.approx(mfu["mfu_percent"] * 2250 / counted[name]) if name in counted else None
            assert mfu.get(f"mfu_{name}_percent") == expected
    assert [name for name in FORMATS if f"Of the {name} peak" in log] == list(counted)


def test_if_one_of_two_ranks_fails_both_emulate(tmp_path):
    dataset = make_dataset(tmp_path / "data", vocab_size=96)
    config = write_config(tmp_path / "run.py", **{**KEYS, "dataset": dataset, "low_precision": "mxfp8"})
    worker = "tests/support/block_scaled_worker.py"
    run_in_one_launch(tmp_path, [[config, f"--out_dir={tmp_path / 'out'}"]], 2, worker=worker)
    executed = last_run(tmp_path / "out")["startup_info"]["low_precision"]["executed"]
    assert executed.startswith(f"bf16, emulates mxfp8 (check failed: rank 1: {WRONG}")


# --- memory ---


@pytest.mark.parametrize(("recipe", "form"), [("mxfp8", 1 + 1 / 32), ("nvfp4", 1 / 2 + 1 / 16)])
def test_the_estimate_counts_the_bytes_of_codes_and_scales(recipe, form):
    config = TrainConfig(low_precision=recipe, arch_preset="qwen3", n_layer=4, n_embd=512, n_head=4)
    emulated, native = (estimate_memory(config, 1, native) for native in (False, True))
    elements = 4 * config.model_config().block_matrices
    assert native[f"quantized weights ({recipe})"] * 2**30 == pytest.approx(2 * form * elements)
    x = random_bf16(256, 512)
    forms = block_forms(x, nvfp4_amaxes(x) if recipe == "nvfp4" else None)
    assert sum(one.nbytes for one in forms) == pytest.approx(2 * form * x.numel(), abs=8)
    assert sum(native.values()) < sum(emulated.values())
