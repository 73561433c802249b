"""A run says when it reached a held-out loss: once for each of loss_targets, and the same on one process, on
two, and after a resume."""

import re

import pytest
from support.helpers import TINY, last_run, make_dataset, run_in_one_launch, write_config

from training import evaluate_and_save

LINE = re.compile(r"🎯 Val loss (\S+) reached at iteration (\S+): .* of training, .* in all, (.*) tokens, ")
KEYS = {"max_iters": 24, "eval_interval": 6, "log_interval": 4, "loss_targets": "3,0.1,3.8"}


@pytest.fixture
def config(tmp_path):
    dataset = make_dataset(tmp_path / "tokens")
    return write_config(tmp_path / "run.py", **{**TINY, **KEYS}, dataset=dataset, out_dir=tmp_path / "out")


def said(out_dir):
    """The lines of all attempts, in their order: (loss, iteration, tokens)."""
    logs = sorted(out_dir.glob("run_*.log"), key=lambda path: path.stat().st_mtime_ns)
    lines = [line for log in logs for line in log.read_text().split("\n") if "🎯" in line]
    return [LINE.search(line).groups() for line in lines]


def places(record):
    targets = record["summary"]["loss_targets"]
    return [(found["loss"], found.get("iteration"), found.get("tokens")) for found in targets]


def test_each_target_is_said_once_and_stands_in_the_summary(run, config, tmp_path):
    assert run(config) == 0
    record = last_run(tmp_path / "out")
    high, low, never = record["summary"]["loss_targets"]
    assert never == {"loss": 0.1, "reached": None} and (high["loss"], low["loss"]) == (3.8, 3)
    losses = {step["iter"]: step["val_loss"] for step in record["eval_steps"]}
    before = max(i for i, loss in losses.items() if loss > 3)
    share = (losses[before] - 3) / (losses[before] - losses[before + 6])
    assert low["iteration"] == pytest.approx(before + 6 * share)
    assert low["tokens"] == pytest.approx(low["iteration"] * record["startup_info"]["tokens_per_iter"])
    assert low["flops"] == pytest.approx(low["tokens"] * record["startup_info"]["flops"]["flops_per_token"])
    assert 0 < low["training_seconds"] == pytest.approx(3600 * low["gpu_hours"])
    assert [loss for loss, *_ in said(tmp_path / "out")] == ["3.8", "3"]
    assert said(tmp_path / "out")[1][1] == f"{low['iteration']:,.1f}".removesuffix(".0")


def test_a_target_that_is_reached_exactly_is_said_once(run, config, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_and_save, "evaluate", lambda *_: {"train": 3.0, "val": 3.0})
    assert run(config, "--max_iters=12") == 0
    assert [loss for loss, *_ in said(tmp_path / "out")] == ["3.8", "3"]


@pytest.mark.resume
@pytest.mark.parametrize("stop", [12, 13])
def test_a_resumed_run_says_the_same_once(run, config, tmp_path, stop):
    """Also where it stops between two log rows, and after an evaluation that reached one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = "--always_save_checkpoint=True", "--lr_decay_iters=100"
    assert run(config, *flags, f"--out_dir={whole}") == 0
    assert run(config, *flags, f"--out_dir={parts}", f"--max_iters={stop}") == 0
    assert run(config, *flags, f"--out_dir={parts}", "--init_from=resume") == 0
    assert said(parts) == said(whole) and len(said(whole)) == 2
    assert places(last_run(parts)) == places(last_run(whole))
    alone = "--eval_only=True", "--init_from=resume", "--loss_targets=60", "--eval_interval=0"
    assert run(config, f"--out_dir={parts}", *alone) == 0
    assert said(parts) == said(whole), "an evaluation alone reaches nothing"


def test_two_processes_count_the_hours_of_both(config, tmp_path):
    run_in_one_launch(tmp_path, [[config]], processes=2)
    found = last_run(tmp_path / "out")["summary"]["loss_targets"][1]
    assert found["gpu_hours"] == pytest.approx(2 * found["training_seconds"] / 3600) and found["tokens"] > 0
    assert [loss for loss, *_ in said(tmp_path / "out")] == ["3.8", "3"], "rank 0 alone says it"


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--loss_targets=3.28,x"], "loss_targets='3.28,x': 'x' is not a positive number"),
        (["--loss_targets=3.28,inf"], "'inf' is not a positive number"),
        (["--loss_targets=3.28,-1"], "'-1' is not a positive number"),
        (["--loss_targets=3.28,3.280"], "3.28 is there twice; write each held-out loss once"),
        (["--eval_interval=0"], "does nothing with eval_interval=0; set --eval_interval=250"),
    ],
)
def test_targets_that_cannot_be_are_refused(run, config, flags, told, capsys):
    assert run(config, *flags) == 2
    assert told in capsys.readouterr().err
