"""An optimizer that is one file outside of the product (support/lion.py) shows in all that a run says, and
needs no file of ours to be read. test_strategies.py has its runs under every strategy, resumed and resharded.
CONTRIBUTING.md names this file as the example."""

import json
import sys

import pytest
import torch
from support.checkpoint_parts import sign
from support.helpers import TINY, checkpoint_tensors, edit_json, last_run, make_dataset, write_config
from support.updates import update

from common.errors import UserError
from training.checkpoints.loading import load_weights, verified_checkpoint
from training.checkpoints.verification import damage
from training.configuration.keys import TrainConfig
from training.configuration.rules import check
from training.memory.estimate import estimate_memory
from training.optimization.optimizer import build_optimizer
from training.strategies.strategy import Shard

ITEM = "Lion's momentum (float32)"


@pytest.fixture
def out(run, tmp_path):
    """The out_dir of a run; run.py beside it starts the same one with AdamW."""
    settings = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "out_dir": tmp_path / "out"}
    assert run(write_config(tmp_path / "run.py", **settings), "--optimizer=support.lion") == 0
    return tmp_path / "out"


def test_the_report_the_record_the_checkpoint_and_the_estimate_of_memory_name_it(out):
    record = last_run(out)
    about, memory = record["startup_info"]["optimizer"], record["startup_info"]["estimated_memory_gb"]
    parameters = record["startup_info"]["model"]["total_params"]
    assert about["type"] == "Lion" and sum(g["params"] for g in about["param_groups"]) == parameters
    assert memory[ITEM] == pytest.approx(4 * parameters / 2**30)
    assert not any("Adam" in item for item in memory)
    report = (out / record["run_name"]).with_suffix(".log").read_text()
    assert "Lion, betas 0.9 0.95" in report and ITEM in report
    sharded = estimate_memory(TrainConfig(**TINY, optimizer="support.lion", use_fsdp=True), 2)
    assert sharded[ITEM] == memory[ITEM] / 2
    state = json.loads((out / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert state["format"] == 5
    assert {name: text for name, text in state["tensors"].items() if "embed" in name} == {
        "model.embed.weight": "F32 (64, 32)",
        "optimizer.embed.weight.step": "F32 ()",
        "optimizer.embed.weight.momentum": "F32 (64, 32)",
    }


def test_a_skipped_update_leaves_every_bit():
    weights = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((4, 8), (8,))]
    shards = [Shard(f"w{i}", weight, weight) for i, weight in enumerate(weights)]
    stored = {"param_dtype": "bfloat16", "weight_rounding": "stochastic"}
    optimizer = build_optimizer(shards, TrainConfig(optimizer="support.lion", **stored))
    for shard in shards:
        shard.local.grad = torch.ones_like(shard.local)
    update(optimizer)
    before = [t.clone() for s in shards for t in (s.local, *optimizer.kept(s).values())]
    update(optimizer, found_inf=1.0)
    now = [t for s in shards for t in (s.local, *optimizer.kept(s).values())]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.fixture
def saved(out, tmp_path, monkeypatch):
    """A stranger's checkpoint. Its optimizer is a module that could be imported, and must not be."""
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "lion.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = out / "checkpoints" / "step-00000004"
    state = json.loads((checkpoint / "state.json").read_text())
    edit_json(checkpoint / "state.json", config=state["config"] | {"optimizer": "strangers.lion"})
    sign(checkpoint)
    yield checkpoint
    assert "strangers" not in sys.modules


def test_its_weights_can_be_read_an_evaluation_and_another_optimizer_begin_with_them(saved, run, capsys):
    assert verified_checkpoint(saved.parents[1], "latest") == saved
    _, model = load_weights(saved, torch.device("cpu"))
    assert torch.equal(model.embed.weight, checkpoint_tensors(saved)["model.embed.weight"])
    begin = [saved.parents[2] / "run.py", "--init_from=resume", "--max_iters=6"]
    assert run(*begin, "--eval_only=True", "--eval_interval=2") == 0
    assert run(*begin) == 2
    assert "optimizer: checkpoint strangers.lion, now adamw" in capsys.readouterr().err
    assert run(*begin, "--allow_changes=optimizer") == 0


def test_an_older_format_imports_no_module_that_a_checkpoint_names(saved):
    edit_json(saved / "state.json", format=4)
    sign(saved)
    assert damage(saved) == ["config.optimizer='strangers.lion' is none of format 4"]


def test_a_key_that_it_does_not_read_is_refused():
    with pytest.raises(UserError, match="adam_dtype='bfloat16' does nothing with optimizer='support.lion'"):
        check(TrainConfig(**TINY, optimizer="support.lion", adam_dtype="bfloat16"), 1)
