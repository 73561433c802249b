"""What only a GPU can show, through train.py. Run there with: python -m pytest -m gpu"""

import shutil

import pytest
import torch
from support.gpu_runs import STRATEGIES, TWO_GPUS, losses, train
from support.graphed_runs import build
from support.helpers import SMALL, SMALL_RUN, evaluations, make_dataset, write_config

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    make_dataset(folder / "tokens", train_tokens=200_000)
    for name, keys in (("run", SMALL), ("longer", SMALL_RUN)):
        write_config(folder / f"{name}.py", **keys, dataset=str(folder / "tokens"))
    return folder


def test_nothing_is_compiled_again_after_the_first_iterations(folder):
    parts = build(folder / "tokens", **SMALL)
    for _ in range(2):
        parts.step(*parts.loader.next(), 1e-3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(5):
            parts.step(*parts.loader.next(), 1e-3 / (i + 1), with_gradient_sum=i == 2)


def test_a_run_on_a_known_gpu_has_an_mfu_and_memory_figures(folder):
    record = train(folder, "plain", "--max_iters=12", "--learning_rate=3e-3")
    rows = record["training_iterations"]
    assert losses(record)[-1] < losses(record)[0] - 0.3
    assert rows[0]["mfu"] is None and "compilation" in rows[0]["mfu_reason"]
    if record["startup_info"]["hardware"]["peak"]["tflops_per_gpu"]:
        assert 0 < rows[-1]["mfu"]["mfu_percent"] < 100
    assert rows[-1]["memory"]["max_allocated_gb"] >= rows[-1]["memory"]["allocated_gb"] > 0
    assert record["startup_info"]["attention"]["used"] == "sdpa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_follows_fp32(folder, dtype):
    gentle = ["--max_iters=8", "--learning_rate=1e-3"]
    reference = train(folder, "fp32", "--dtype=float32", *gentle)
    record = train(folder, dtype, f"--dtype={dtype}", *gentle)
    kept = [row for row in record["training_iterations"] if not row.get("skipped_updates")]
    assert len(kept) >= 6  # float16 may start with a scale that is too high
    assert losses(record) == pytest.approx(losses(reference), rel=2e-2)


@pytest.mark.parametrize(
    ("name", "processes"),
    [("single", 1)] + [pytest.param(name, 2, marks=TWO_GPUS) for name in STRATEGIES],
)
def test_resume_is_bit_exact_on_gpus(folder, name, processes):
    flags = [*STRATEGIES.get(name, []), "--max_iters=8", "--eval_interval=4", "--keep_last=None"]
    flags += ["--dropout=0.1"]
    whole = train(folder, f"whole-{name}", *flags, processes=processes)
    kept = "checkpoints/step-00000004"
    shutil.copytree(folder / f"whole-{name}" / kept, folder / f"resumed-{name}" / kept)
    resumed = train(folder, f"resumed-{name}", *flags, "--init_from=resume", processes=processes)
    assert losses(resumed) == losses(whole)[4:]
    assert evaluations(resumed)[-1] == evaluations(whole)[-1]


SCALING = "--rope_scaling={'rope_type': 'yarn', 'factor': 4, 'original_max_position_embeddings': 64}"
PUBLISHED_SHAPES = {  # on a width of 256: heads together wider, and of a width that no Triton kernel takes
    "wide": ["--head_dim=128", "--qkv_bias=True", SCALING],
    "not a power of two": ["--head_dim=80", "--qkv_bias=True", SCALING],
}


@pytest.mark.parametrize("shape", PUBLISHED_SHAPES)
def test_head_width_biases_and_scaled_positions_are_the_same_compiled_captured_and_on_a_cpu(folder, shape):
    """In fp8 also without biases, where the projection to heads is one operation."""
    flags = [*PUBLISHED_SHAPES[shape], "--max_iters=16", "--learning_rate=1e-3"]
    name = shape.replace(" ", "_")
    compiled = train(folder, f"{name}-compiled", *flags)
    eager = train(folder, f"{name}-eager", *flags, "--compile=False")
    captured = train(folder, f"{name}-captured", *flags, "--use_cuda_graphs=True")
    assert captured["startup_info"]["cuda_graphs"]["used"] == "CUDA Graph"
    exact = [*flags, "--dtype=float32", "--compile=False", "--eval_interval=4", "--keep_last=None"]
    fp32 = train(folder, f"{name}-fp32", *exact)
    begun = "checkpoints/step-00000004"  # a CPU would draw other weights
    shutil.copytree(folder / f"{name}-fp32" / begun, folder / f"{name}-cpu" / begun)
    on_cpu = train(folder, f"{name}-cpu", *exact, "--device=cpu", "--init_from=resume")
    fp8 = train(folder, f"{name}-fp8", *flags, "--low_precision=fp8_tensorwise")
    unbiased = [*flags, "--qkv_bias=False"]
    plain = train(folder, f"{name}-unbiased", *unbiased)
    fused = train(folder, f"{name}-fused", *unbiased, "--low_precision=fp8_tensorwise")
    assert losses(captured) == pytest.approx(losses(compiled), rel=1e-3)
    assert losses(eager) == pytest.approx(losses(compiled), rel=5e-3)
    assert losses(fp32)[4:] == pytest.approx(losses(on_cpu), rel=1e-3)
    assert losses(compiled) == pytest.approx(losses(fp32), rel=1e-2)
    assert losses(fp8) == pytest.approx(losses(compiled), rel=2e-2)
    assert losses(fused) == pytest.approx(losses(plain), rel=2e-2)


@TWO_GPUS
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_gpus_give_the_losses_of_one(folder, name):
    exact = ["--dtype=float32", "--max_iters=6"]
    one = train(folder, f"one-{name}", *exact, "--gradient_accumulation_steps=4")
    two = train(folder, f"two-{name}", *exact, *STRATEGIES[name], processes=2)
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)


@TWO_GPUS
@pytest.mark.parametrize("more", [[], ["--low_precision=fp8_tensorwise"], ["--weight_tying=True"]])
def test_fsdp_whose_matmuls_sum_gradients_trains_as_one_gpu(folder, more):
    """Also compiled, where the sums are arguments of the backward. The first norm is of equal weights."""
    name = "-".join(more).strip("-").replace("=", "-") or "bf16"
    flags = [*more, "--gradient_accumulation_steps=4"]
    one = train(folder, f"one-{name}", *flags, config="longer.py")
    two = train(folder, f"fused-{name}", *more, "--use_fsdp=True", config="longer.py", processes=2)
    assert two["startup_info"]["gradient_sums"]["used"] == "in the matmul"
    norms = [record["training_iterations"][0]["gradients"]["global_norm"] for record in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=5e-3)
    assert losses(two)[:3] == pytest.approx(losses(one)[:3], rel=2e-3)
    assert losses(two) == pytest.approx(losses(one), rel=2e-2)
