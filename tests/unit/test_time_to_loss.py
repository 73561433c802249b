"""When a run reached a loss, in records whose answer can be computed by hand."""

import copy

import pytest

from common.time_to_loss import Progress

START = "2026-11-25T10:00:00+00:00"


def row(end, ms, attempt=1, gpus=2):
    """The row that ends after `end` iterations of 100 tokens."""
    speed = 100 / ms * 1000
    return {
        "iter": end - 1,
        "time_ms": ms,
        "attempt": attempt,
        "tokens_seen": 100 * end,
        "tokens_per_sec": speed,
        "tokens_per_sec_per_gpu": speed / gpus,
    }


def evaluation(iteration, loss, second):
    return {"iter": iteration, "val_loss": loss, "time": f"2026-11-25T10:00:{second:02}+00:00"}


RECORD = {
    "start_time": START,
    "attempts": [{"start_time": START}],
    "startup_info": {"tokens_per_iter": 100, "flops": {"flops_per_token": 7.0}},
    # the first row compiles: it counts as 100 ms
    "training_iterations": [row(1, 9000), row(11, 100), row(21, 100), row(31, 200)],
    "eval_steps": [evaluation(10, 4.0, 12), evaluation(20, 3.0, 20), evaluation(30, 2.0, 30)],
}


def test_between_two_evaluations_the_loss_is_a_line_over_iterations():
    found = Progress(RECORD).reached(2.5)
    assert (found.iteration, found.tokens, found.flops) == (25, 2500, 17_500)
    assert found.training_seconds == pytest.approx(21 * 0.1 + 4 * 0.2)
    assert found.wall_seconds == pytest.approx(25)
    assert found.gpu_hours == pytest.approx(2 * found.training_seconds / 3600)


def test_an_evaluated_loss_is_reached_there_and_a_lower_one_never():
    progress = Progress(RECORD)
    assert progress.reached(3.0).iteration == 20 and progress.reached(4.5).iteration == 10
    assert progress.reached(1.9) is None
    last = progress.at_last_evaluation()
    assert (last.iteration, last.tokens, last.wall_seconds) == (30, 3000, 30)


def test_the_first_time_counts_where_the_loss_rises_again():
    record = copy.deepcopy(RECORD)
    record["eval_steps"].append(evaluation(31, 2.8, 40))
    assert Progress(record).reached(2.5).iteration == 25
    assert Progress(record).below_since(2.5).iteration == 31, "it is not below at the end"
    assert Progress(record).below_since(2.9).iteration == pytest.approx(21)


def test_each_attempt_compiles_and_time_between_attempts_is_wall_clock_alone():
    record = copy.deepcopy(RECORD)
    record["attempts"].append({"start_time": "2026-11-25T10:00:50+00:00"})
    record["training_iterations"] += [row(32, 7000, 2), row(42, 300, 2)]
    record["eval_steps"].append(evaluation(42, 1.0, 59))
    found = Progress(record).reached(1.0)
    assert found.training_seconds == pytest.approx(21 * 0.1 + 10 * 0.2 + 11 * 0.3)
    assert found.wall_seconds == 59


def test_what_an_older_record_lacks_is_none():
    record = copy.deepcopy(RECORD)
    del record["startup_info"]["flops"]
    for step in record["eval_steps"]:
        del step["time"]
    for each in record["training_iterations"]:
        del each["tokens_seen"]
    found = Progress(record).reached(2.5)
    assert (found.tokens, found.flops, found.wall_seconds) == (2500, None, None)
    with pytest.raises(ValueError, match="no row with a time"):
        Progress({"training_iterations": [], "eval_steps": []})
