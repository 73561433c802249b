"""A schedule that is not stated fits the run: its length is the first attempt's, and a resume keeps it."""

import re
from dataclasses import replace

import pytest
from support.checkpoint_parts import ALONE, make_config, make_saver, make_state, save
from support.helpers import TINY, last_run, make_dataset, write_config

from common.errors import UserError
from training.checkpoints.resume import find_resume
from training.configuration.keys import TrainConfig
from training.optimization.optimizer import optimizer_warnings
from training.optimization.schedule import (
    fix_schedule,
    learning_rate,
    schedule_warnings,
    warmup_and_decay_iters,
)

NOT_STATED = {"warmup_iters": None, "lr_decay_iters": None}


@pytest.mark.parametrize(
    ("max_iters", "lengths"),
    [(60, (6, 60)), (300, (30, 300)), (25_000, (2000, 25_000)), (9, (0, 9)), (0, (0, 1))],
)
def test_a_run_without_a_stated_schedule_warms_up_in_a_tenth_and_decays_to_its_end(max_iters, lengths):
    config = TrainConfig(max_iters=max_iters)
    assert warmup_and_decay_iters(config) == lengths
    assert learning_rate(lengths[0], config) == config.learning_rate
    assert learning_rate(lengths[1], config) == pytest.approx(config.min_lr)


@pytest.fixture
def begun(tmp_path):
    """A checkpoint of a first attempt of 40 iterations that states no schedule."""
    config = find_resume(make_config(tmp_path / "out", max_iters=40, **NOT_STATED), ALONE, {}).config
    assert (config.warmup_iters, config.lr_decay_iters) == (4, 40)
    save(make_saver(config, make_state(config)), 3, 1.0)
    return tmp_path / "out"


def resumed(out_dir, **keys):
    keys = {"max_iters": 400, "init_from": "resume", **NOT_STATED, **keys}
    return find_resume(make_config(out_dir, **keys), ALONE, {})


def test_a_longer_resume_keeps_the_schedule_and_a_stated_length_is_another_run_unless_it_is_allowed(begun):
    assert warmup_and_decay_iters(resumed(begun).config) == (4, 40)
    assert resumed(begun).changed == {"max_iters": [40, 400]}
    with pytest.raises(UserError, match="lr_decay_iters: checkpoint 40, now 400.*=lr_decay_iters$"):
        resumed(begun, lr_decay_iters=400)
    with pytest.raises(UserError, match="warmup_iters: checkpoint 4, now 9.*=warmup_iters$"):
        resumed(begun, warmup_iters=9)
    allowed = resumed(begun, lr_decay_iters=400, allow_changes="lr_decay_iters").config
    assert warmup_and_decay_iters(allowed) == (4, 400), "the warm-up is the first attempt's still"
    for end in (3, 4):
        with pytest.raises(UserError, match=f"warmup_iters=4 is not below lr_decay_iters={end}"):
            resumed(begun, lr_decay_iters=end, allow_changes="lr_decay_iters")


@pytest.mark.parametrize("value", [None, "40", 40.0, True, 0, -1, 2**70])
def test_what_is_no_length_in_a_checkpoint_is_not_taken(value):
    assert fix_schedule(TrainConfig(max_iters=60), {"lr_decay_iters": value}).lr_decay_iters == 60


WARNS = [{"warmup_iters": 2000}, {"warmup_iters": 31}, {"lr_decay_iters": 25_000}]
SILENT = [{"warmup_iters": 30}, {}, {"warmup_iters": 2000, "eval_only": True}]
SILENT += [{"max_iters": 0, "warmup_iters": 2000}]


@pytest.mark.parametrize("keys", [*WARNS, *SILENT], ids=str)
def test_a_warm_up_of_more_than_half_the_run_is_a_warning_with_the_fix(keys):
    warns, keys = keys in WARNS, {"max_iters": 60, **keys}
    warnings = schedule_warnings(TrainConfig(**keys))
    assert len(warnings) == warns
    if warns:
        assert "max_iters=60" in warnings[0]
        fix = dict(re.findall(r"--(\w+)=(\d+)", warnings[0]))
        assert fix == {"warmup_iters": "6", "lr_decay_iters": "60"}
        fixed = TrainConfig(**{**keys, **{name: int(value) for name, value in fix.items()}})
        assert schedule_warnings(fixed) == []


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("min_lr", [0.0, 3e-5, 3e-4])
def test_a_run_beyond_its_decay_is_a_warning_with_the_fix(schedule, min_lr):
    """Where the rate has fallen by then; also of a new run whose lr_decay_iters is stated."""
    ended = fix_schedule(TrainConfig(max_iters=40, lr_schedule=schedule, min_lr=min_lr), {})
    assert schedule_warnings(ended) == []
    longer = replace(ended, max_iters=60, init_from="resume", allow_changes="seed")
    warnings = schedule_warnings(longer)
    assert len(warnings) == (schedule != "constant" and min_lr < 3e-4)
    assert schedule_warnings(replace(longer, eval_only=True)) == []
    if warnings:
        assert ("changes no weight" in warnings[0]) == (min_lr == 0)
        assert "every iteration from 40 on" in warnings[0]
        assert warnings[0].endswith("--lr_decay_iters=60 --allow_changes=seed,lr_decay_iters")
        assert schedule_warnings(replace(longer, lr_decay_iters=60)) == []
        assert schedule_warnings(replace(longer, init_from="scratch"))[0].endswith("--lr_decay_iters=60")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"beta2": 0.0}, "beta2=0 is not above beta1^2=0.81"),
        ({"beta1": 0.99, "beta2": 0.95}, "beta2=0.95 is not above beta1^2=0.9801"),
        ({"beta1": 0.0, "beta2": 0.0}, None),  # the sign of the gradient: no update is above the rate
        ({"learning_rate": 10.0}, "times weight_decay=0.1 is at least 1"),
        ({"learning_rate": 0.0, "min_lr": 0.0}, "learning_rate=0 changes no weight"),
        ({"beta2": 0.0, "eval_only": True}, None),
        ({}, None),
    ],
)
def test_legal_values_with_which_nothing_is_learned_are_a_warning(keys, said):
    warnings = optimizer_warnings(TrainConfig(**keys))
    assert [said in warning for warning in warnings] == [True] if said else warnings == []


def test_the_warning_is_at_the_start_and_in_the_record(run, tmp_path, capfd):
    keys = {**TINY, **NOT_STATED, "max_iters": 4, "dataset": make_dataset(tmp_path / "tokens")}
    config = write_config(tmp_path / "run.py", **keys, out_dir=tmp_path / "out")
    assert run(config, "--warmup_iters=3", "--beta2=0") == 0
    output, record = capfd.readouterr().out, last_run(tmp_path / "out")
    warning, of_beta2 = record["startup_info"]["warnings"]
    assert "beta2=0 " in of_beta2 and f"warning: {of_beta2}" in output
    assert f"warning: {warning}" in output and output.index(warning) < output.index("Iter      0")
    assert record["config"]["lr_decay_iters"] == 4
    assert run(config, "--warmup_iters=3", "--dry_run=True") == 0
    assert f"warning: {warning}" in capfd.readouterr().out
    assert run(config, f"--out_dir={tmp_path / 'other'}") == 0
    assert "warning: " not in capfd.readouterr().out
    record = last_run(tmp_path / "other")
    assert record["startup_info"]["warnings"] == []
    assert record["config"]["warmup_iters"] == 0
    resume = "--init_from=resume", "--max_iters=6", f"--out_dir={tmp_path / 'other'}"
    assert run(config, *resume) == 0
    assert "warning: lr_decay_iters=4 comes before max_iters=6" in capfd.readouterr().out
