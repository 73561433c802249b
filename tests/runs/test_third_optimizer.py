"""An optimizer that is one file outside of the product (support/lion.py) trains, resumes, reshards, and shows
in all that a run says. CONTRIBUTING.md names this file as the example."""

import json
import shutil
import sys

import pytest
import torch
from support.checkpoint_parts import sign
from support.helpers import (
    TINY,
    checkpoint_tensors,
    edit_json,
    last_run,
    make_dataset,
    run_in_one_launch,
    write_config,
)
from support.updates import update

from common.errors import UserError
from training.checkpoints.loading import load_weights, verified_checkpoint
from training.checkpoints.verification import damage
from training.configuration.keys import TrainConfig
from training.configuration.rules import check
from training.optimization.optimizer import build_optimizer
from training.strategies.strategy import Shard

LION = "--optimizer=support.lion"
STRATEGIES = {"alone": [], "ddp": [], "zero1": ["--use_zero1=True"], "fsdp": ["--use_fsdp=True"]}
RESUME, HALF = "--init_from=resume", "step-00000004"
LAST = "step-00000008"


def command(folder, strategy: str, out: str, *flags) -> list:
    """Eight sequences in each iteration, by one process or by two."""
    batch = f"--batch_size={8 if strategy == 'alone' else 4}"
    return [folder / "run.py", LION, batch, *STRATEGIES[strategy], f"--out_dir={folder / out}", *flags]


def halves(folder, strategy: str) -> list[list]:
    """A run, and the same run stopped in the middle and resumed."""
    resumed = f"{strategy}-resumed"
    return [
        command(folder, strategy, strategy),
        command(folder, strategy, resumed, "--max_iters=4"),
        command(folder, strategy, resumed, RESUME),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of every strategy, and those that go on with what another one saved."""
    folder = tmp_path_factory.mktemp("lion")
    settings = {**TINY, "dataset": make_dataset(folder / "tokens"), "max_iters": 8, "eval_interval": 4}
    write_config(folder / "run.py", **{**settings, "keep_last": None, "learning_rate": 3e-3})
    run_in_one_launch(folder, halves(folder, "alone"))
    to_two = [("alone", "fsdp"), ("alone", "zero1")]
    several = [one for strategy in ("ddp", "zero1", "fsdp") for one in halves(folder, strategy)]
    run_in_one_launch(folder, [*several, *resharded(folder, to_two)], 2)
    run_in_one_launch(folder, resharded(folder, [("fsdp", "alone"), ("zero1", "alone")]))
    return folder


def resharded(folder, pairs) -> list[list]:
    for was, now in pairs:
        saved = folder / was / "checkpoints" / HALF
        shutil.copytree(saved, folder / f"{was}-to-{now}" / "checkpoints" / HALF)
    return [command(folder, now, f"{was}-to-{now}", RESUME) for was, now in pairs]


def losses(folder, out: str) -> list[float]:
    return [row["loss"] for row in last_run(folder / out)["training_iterations"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_learns_alike_under_every_strategy(folder, strategy):
    found = losses(folder, strategy)
    assert found == pytest.approx(losses(folder, "alone"), rel=5e-3)
    assert found[-1] < found[0] - 0.1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resume_is_bit_exact(folder, strategy):
    whole, resumed = (
        checkpoint_tensors(folder / out / "checkpoints" / LAST) for out in (strategy, f"{strategy}-resumed")
    )
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    assert whole["optimizer.embed.weight.momentum"].any()
    assert whole["optimizer.embed.weight.step"] == 8
    assert losses(folder, f"{strategy}-resumed") == losses(folder, strategy)


@pytest.mark.parametrize("out", ["alone-to-fsdp", "alone-to-zero1", "fsdp-to-alone", "zero1-to-alone"])
def test_another_strategy_and_number_of_processes_go_on(folder, out):
    assert losses(folder, out) == pytest.approx(losses(folder, "alone")[4:], rel=5e-3)


def test_the_report_the_record_and_the_estimate_of_memory_name_it(folder):
    record = last_run(folder / "alone")
    about, memory = record["startup_info"]["optimizer"], record["startup_info"]["estimated_memory_gb"]
    parameters = record["startup_info"]["model"]["total_params"]
    assert about["type"] == "Lion" and sum(g["params"] for g in about["param_groups"]) == parameters
    assert memory["Lion's momentum (float32)"] == pytest.approx(4 * parameters / 2**30)
    assert not any("Adam" in item for item in memory)
    report = (folder / "alone" / record["run_name"]).with_suffix(".log").read_text()
    assert "Lion, betas 0.9 0.95" in report and "Lion's momentum (float32)" in report
    sharded = last_run(folder / "fsdp")["startup_info"]["estimated_memory_gb"]
    assert sharded["Lion's momentum (float32)"] == memory["Lion's momentum (float32)"] / 2


def test_a_checkpoint_lists_what_it_keeps(folder):
    state = json.loads((folder / "zero1" / "checkpoints" / LAST / "state.json").read_text())
    assert state["format"] == 5
    listed = {name: text for name, text in state["tensors"].items() if "embed" in name}
    assert listed == {
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


# --- without its file ---


@pytest.fixture
def saved(folder, tmp_path, monkeypatch):
    """A stranger's checkpoint. Its optimizer is a module that could be imported, and must not be."""
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "lion.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    checkpoint = tmp_path / "out" / "checkpoints" / LAST
    shutil.copytree(folder / "alone" / "checkpoints" / LAST, checkpoint)
    state = json.loads((checkpoint / "state.json").read_text())
    edit_json(checkpoint / "state.json", config=state["config"] | {"optimizer": "strangers.lion"})
    sign(checkpoint)
    yield checkpoint
    assert "strangers" not in sys.modules


def test_its_weights_can_be_read(saved):
    assert verified_checkpoint(saved.parents[1], "latest") == saved
    _, model = load_weights(saved, torch.device("cpu"))
    assert torch.equal(model.embed.weight, checkpoint_tensors(saved)["model.embed.weight"])


def test_an_evaluation_and_another_optimizer_begin_with_its_weights(saved, folder, run, capsys):
    begin = [folder / "run.py", "--batch_size=8", f"--out_dir={saved.parents[1]}", RESUME, "--max_iters=9"]
    assert run(*begin, "--eval_only=True") == 0
    assert run(*begin) == 2
    assert "optimizer: checkpoint strangers.lion, now adamw" in capsys.readouterr().err
    assert run(*begin, "--allow_changes=optimizer") == 0


def test_a_resume_says_what_is_missing(folder, run, capsys):
    begin = [folder / "run.py", "--batch_size=8", f"--out_dir={folder / 'alone'}", RESUME]
    assert run(*begin, "--optimizer=gone.lion") == 2
    assert "optimizer='gone.lion': gone.lion cannot be imported (No module named" in capsys.readouterr().err
    assert run(*begin, "--optimizer=common.text") == 2
    assert "the module common.text has no class named OPTIMIZER" in capsys.readouterr().err


def test_a_class_that_is_no_optimizer_is_refused(monkeypatch):
    monkeypatch.setattr("support.lion.OPTIMIZER", dict)
    with pytest.raises(UserError, match="dict is no subclass of training.optimization.optimizer.Optimizer"):
        build_optimizer([], TrainConfig(optimizer="support.lion"))


def test_an_older_format_imports_no_module_that_a_checkpoint_names(saved):
    edit_json(saved / "state.json", format=4)
    sign(saved)
    assert damage(saved) == ["config.optimizer='strangers.lion' is none of format 4"]


def test_a_key_that_it_does_not_read_is_refused():
    with pytest.raises(UserError, match="adam_dtype='bfloat16' does nothing with optimizer='support.lion'"):
        check(TrainConfig(**TINY, optimizer="support.lion", adam_dtype="bfloat16"), 1)
