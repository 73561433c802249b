"""A recipe that nobody here has heard of, tests/support/int8_weights.py: one file, named by its module. It
trains under every strategy, goes on bit-equal after a kill, and shows wherever the others show."""

import os
import shutil
import signal

import pytest
import torch
from support.helpers import (
    HANG_S,
    ROOT,
    TINY,
    checkpoint_tensors,
    last_run,
    make_dataset,
    run_in_one_launch,
    run_train,
    start_train,
    write_config,
)
from support.int8_weights import Int8Linear

import model_builder
from training.configuration.keys import TrainConfig
from training.memory.estimate import estimate_memory
from training.optimization.low_precision import use_recipe

NAME = "support.int8_weights"
WITH_IT = {
    **TINY,
    "dtype": "bfloat16",
    "low_precision": NAME,
    "low_precision_scope": "layers_and_head",
    "max_iters": 6,
    "gradient_accumulation_steps": "auto",
    "tokens_per_iter": 8 * 32,
    "batch_size": 2,
    "eval_interval": 3,
    "keep_last": None,
}
STRATEGIES = {"ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}
ITS_PATH = {"PYTHONPATH": str(ROOT / "tests")}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    return write_config(folder / "config.py", **WITH_IT, dataset=make_dataset(folder / "data"))


@pytest.fixture(scope="module")
def runs(config):
    """{strategy: its out_dir}; and "zero1 goes on", which begins in the middle of FSDP's run."""
    folder = config.parent
    run_in_one_launch(folder, [[config, f"--out_dir={folder / 'single'}"]])
    outs = {name: folder / name for name in STRATEGIES}
    run_in_one_launch(
        folder, [[config, f"--out_dir={outs[name]}", *flags] for name, flags in STRATEGIES.items()], 2
    )
    outs |= {"single": folder / "single", "another division": folder / "another"}
    shutil.copytree(outs["fsdp"], outs["another division"])
    shutil.rmtree(outs["another division"] / "checkpoints" / "step-00000006")
    go_on = [config, f"--out_dir={outs['another division']}", "--init_from=resume", *STRATEGIES["zero1"]]
    run_in_one_launch(folder, [go_on], 2)
    return outs


@pytest.mark.parametrize("strategy", [*STRATEGIES, "another division"])
def test_it_trains_alike_under_every_strategy(runs, strategy):
    def losses(out):
        return [row["loss"] for row in last_run(out)["training_iterations"]]

    alone = losses(runs["single"])
    assert alone[-1] < alone[0] - 0.2
    assert losses(runs[strategy]) == pytest.approx(alone, rel=5e-3)


def test_matmuls_see_255_steps_and_the_weights_that_are_trained_have_more():
    config = TrainConfig(**{**WITH_IT, "gradient_accumulation_steps": 1, "tokens_per_iter": None})
    model = model_builder.build_model(config.model_config(), dtype=torch.bfloat16).init_weights("cpu", 1)
    before = set(dict(model.named_parameters()))
    recipe = use_recipe(model, config)
    assert set(dict(model.named_parameters())) == before
    layers = list(recipe.linears.values())
    Int8Linear.refresh(layers)
    for layer in layers:
        seen, _, _ = layer.operands(torch.float32)
        assert max(len(row.unique()) for row in seen) <= 255
        assert (seen - layer.weight).abs().max() <= layer.steps.max() / 2 * 1.001


def test_report_record_and_memory_say_it(config, runs):
    record = last_run(runs["fsdp"])
    low = record["startup_info"]["low_precision"]
    assert (low["recipe"], low["executed"], low["layers"]) == (NAME, "bf16, weights of int8", 9)
    assert f"quantized weights ({NAME})" in record["startup_info"]["estimated_memory_gb"]
    assert any("it needs kernels that multiply int8" in text for text in record["startup_info"]["warnings"])
    log = next(runs["fsdp"].glob("run_*.log")).read_text()
    assert f"{NAME} matmuls in layers_and_head (bf16, weights of int8)" in log
    settings = {**WITH_IT, "gradient_accumulation_steps": 1, "tokens_per_iter": None}
    plain = estimate_memory(TrainConfig(**{**settings, "low_precision": "none"}), 1)
    ours = estimate_memory(TrainConfig(**settings), 1)
    matrices = 2 * (32 * (64 + 32) + 32 * 128 + 64 * 32) + 64 * 32
    assert sum(ours.values()) - sum(plain.values()) >= matrices / 2**30


def test_a_killed_run_ends_with_the_same_bits(config, runs):
    out = config.parent / "killed"
    command = [config, f"--out_dir={out}", "--init_from=auto", "--checkpoint_interval=1"]
    run = start_train(*command, **ITS_PATH)
    for line in run.stdout:
        if "Iter      3" in line:
            break
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=HANG_S)
    done = run_train(*command, **ITS_PATH)
    assert done.returncode == 0, done.stderr
    pair = [checkpoint_tensors(one / "checkpoints" / "step-00000006") for one in (out, runs["single"])]
    assert pair[0].keys() == pair[1].keys()
    assert all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("nobody.has_it", "nobody.has_it cannot be imported (No module named 'nobody')"),
        ("support.helpers", "the module support.helpers has no class named RECIPE"),
        ("support.no_recipe", "NotOne is no subclass of ops.recipe.Recipe; CONTRIBUTING.md shows one"),
        ("int8", "'int8' is not one of 'none', 'fp8_tensorwise'"),
    ],
)
def test_a_module_that_is_no_recipe_is_one_clear_line(config, module, says):
    done = run_train(config, f"--low_precision={module}", f"--out_dir={config.parent / 'no'}", **ITS_PATH)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
