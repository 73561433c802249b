"""A run with head_dim, qkv_bias and rope_scaling: what it saves, records and goes on from."""

import json

import pytest
import torch
from support.helpers import TINY, last_run, make_dataset, write_config

from generation.cache import cached_attention
from generation.decoding import generate
from training.checkpoints.loading import load_model

SCALING = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 64}
KEYS = {**TINY, "head_dim": 12, "qkv_bias": True, "rope_scaling": SCALING, "eval_interval": 2}


@pytest.fixture
def config(tmp_path):
    dataset = make_dataset(tmp_path / "tokens")
    return write_config(tmp_path / "run.py", **KEYS, dataset=dataset)


def losses(record):
    return {row["iter"]: row["loss"] for row in record["training_iterations"]}


def test_a_resume_takes_the_shapes_from_file_flag_or_checkpoint_as_the_same(run, config, tmp_path):
    whole, parts = (f"--out_dir={tmp_path / name}" for name in ("whole", "parts"))
    assert run(config, whole, "--max_iters=6") == 0
    assert run(config, parts, "--max_iters=4") == 0
    spelled = json.dumps({**SCALING, "factor": 8.0})  # as a user types it in quotes
    assert run(config, parts, "--max_iters=6", "--init_from=resume", f"--rope_scaling={spelled}") == 0
    resumed = last_run(tmp_path / "parts")
    assert losses(resumed) == losses(last_run(tmp_path / "whole"))
    assert "rope_scaling" not in resumed["startup_info"]["changed_since_checkpoint"]
    architecture = resumed["startup_info"]["model"]["architecture"]
    assert architecture["rope_scaling"] == SCALING
    assert (architecture["head_dim"], architecture["qkv_bias"]) == (12, True)
    assert resumed["config"]["rope_scaling"] == SCALING


@pytest.mark.parametrize(
    ("flag", "difference"),
    [
        ("--rope_scaling=None", "rope_scaling: checkpoint {'rope_type': 'llama3', 'factor': 8.0, "),
        ("--head_dim=None", "head_dim: checkpoint 12, configuration 8"),
        ("--qkv_bias=False", "qkv_bias: checkpoint True, configuration False"),
    ],
)
def test_a_resume_as_another_model_is_refused_by_name(run, config, tmp_path, capfd, flag, difference):
    out = f"--out_dir={tmp_path / 'out'}"
    assert run(config, out, "--max_iters=2") == 0
    assert run(config, out, "--init_from=resume", flag) == 2
    error = capfd.readouterr().err
    assert "holds another architecture" in error and difference in error


def test_samples_come_from_the_model_that_was_trained(run, config, tmp_path):
    assert run(config, f"--out_dir={tmp_path / 'out'}", "--max_iters=60", "--log_interval=20") == 0
    _, saved, model = load_model(tmp_path / "out", "latest", torch.device("cpu"), cached_attention)
    assert saved.config["rope_scaling"] == SCALING
    assert model.config.rope_scaling.to_dict() == SCALING
    (new,) = generate(model.eval(), [[1, 2]], 20)
    steps = torch.tensor([2, *new]).diff() % KEYS["vocab_size"]
    assert ((steps == 1) | (steps == 2)).float().mean() > 0.8, "the next id is one or two above the last"
