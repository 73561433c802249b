"""A recipe that nobody here has heard of, tests/support/int8_weights.py: one file, named by its module, shows
wherever the others show. test_strategies.py has its runs under every strategy, and their resumes;
unit/test_choices.py what is said of a module that is no recipe."""

import torch
from support.helpers import TINY, last_run, make_dataset, write_config
from support.int8_weights import Int8Linear

import model_builder
from training.configuration.keys import TrainConfig
from training.memory.estimate import estimate_memory
from training.optimization.low_precision import use_recipe

NAME = "support.int8_weights"
WITH_IT = {**TINY, "dtype": "bfloat16", "low_precision": NAME, "low_precision_scope": "layers_and_head"}


def test_matmuls_see_255_steps_and_the_weights_that_are_trained_have_more():
    config = TrainConfig(**WITH_IT)
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


def test_report_record_and_memory_say_it(run, tmp_path):
    settings = {**WITH_IT, "dataset": make_dataset(tmp_path / "data"), "out_dir": tmp_path / "out"}
    assert run(write_config(tmp_path / "run.py", **settings)) == 0
    record = last_run(tmp_path / "out")
    low = record["startup_info"]["low_precision"]
    assert (low["recipe"], low["executed"], low["layers"]) == (NAME, "bf16, weights of int8", 9)
    assert f"quantized weights ({NAME})" in record["startup_info"]["estimated_memory_gb"]
    assert any("it needs kernels that multiply int8" in text for text in record["startup_info"]["warnings"])
    log = next((tmp_path / "out").glob("run_*.log")).read_text()
    assert f"{NAME} matmuls in layers_and_head (bf16, weights of int8)" in log
    matrices = 2 * (32 * (64 + 32) + 32 * 128 + 64 * 32) + 64 * 32
    assert estimate_memory(TrainConfig(**WITH_IT), 1)[f"quantized weights ({NAME})"] == matrices / 2**30
