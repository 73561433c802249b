"""Runs in each recipe on GPUs: kernels and compiled code against plain forms on a CPU, resume, strategies."""

import pytest
from support import gpu_runs
from support.gpu_runs import STRATEGIES, TWO_GPUS, losses, needs_fp8
from support.helpers import SMALL_RUN, make_dataset, write_config

from tools import export_hf

pytestmark = pytest.mark.gpu

RECIPES = ("fp8_delayed", "mxfp8", "nvfp4")
KEYS = {  # widths and tokens that all recipes can have
    **SMALL_RUN,
    "vocab_size": 128,
    "learning_rate": 5e-4,
    "low_precision_scope": "layers_and_head",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    make_dataset(folder / "tokens", vocab_size=128, train_tokens=200_000)
    return folder


def train(folder, recipe: str, out: str, processes: int = 1, flags=(), **keys) -> dict:
    if recipe == "fp8_delayed":
        needs_fp8()
    keys = {**KEYS, "dataset": folder / "tokens", "low_precision": recipe, **keys}
    config = write_config(folder / f"{out}.py", **keys)
    return gpu_runs.train(folder, out.split(".")[0], *flags, config=config.name, processes=processes)


@pytest.fixture(scope="module")
def weights(folder):
    """For runs on a GPU and on a CPU, which draw other ones."""
    train(folder, "none", "drawn", device="cpu", compile=False, max_iters=1, low_precision_scope="layers")
    export_hf.main([str(folder / "drawn"), str(folder / "weights"), "--dtype=float32"])
    return f"hf:{folder / 'weights'}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_kernels_train_as_plain_operations_on_a_cpu(folder, weights, recipe):
    """The first losses are of equal weights. Later ones part by what other orders of sums become."""
    gpu = train(folder, recipe, f"gpu-{recipe}", init_weights=weights)
    on_cpu = {"device": "cpu", "compile": False, "eval_interval": 0, "max_iters": 8}
    cpu = train(folder, recipe, f"cpu-{recipe}", init_weights=weights, **on_cpu)
    assert losses(gpu)[0] == pytest.approx(losses(cpu)[0], rel=2e-3)
    assert losses(gpu)[:8] == pytest.approx(losses(cpu), rel=3e-2)
    said = gpu["startup_info"]["low_precision"]
    native = recipe == "fp8_delayed"
    assert said["native"] == native
    assert said["executed"] == ("native fp8" if native else f"bf16, emulates {recipe}")
    assert all(
        ("mfu_fp8_percent" in row["mfu"]) == native for row in gpu["training_iterations"] if row["mfu"]
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_resumes_bit_for_bit(folder, recipe):
    whole = losses(train(folder, recipe, f"whole-{recipe}"))
    train(folder, recipe, f"part-{recipe}", max_iters=10)
    resumed = losses(train(folder, recipe, f"part-{recipe}.resumed", init_from="resume"))
    assert resumed == whole


@TWO_GPUS
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])  # which keep something from step to step
def test_two_gpus_train_as_one(folder, recipe, strategy):
    one = train(folder, recipe, f"one-{recipe}-{strategy}", gradient_accumulation_steps=4, max_iters=10)
    two = train(folder, recipe, f"two-{recipe}-{strategy}", 2, STRATEGIES[strategy], max_iters=10)
    assert losses(two)[:2] == pytest.approx(losses(one)[:2], rel=5e-3)
    assert losses(two) == pytest.approx(losses(one), rel=5e-2)
