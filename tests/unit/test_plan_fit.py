"""tools.plan --fit and --records: what runs tell about the law and the machine, and what they cannot tell."""

import json

import numpy as np
import pytest

from common.errors import UserError
from tools.plan import __main__ as plan_command
from tools.plan.fit import fit
from tools.plan.law import HOFFMANN, Law
from tools.plan.machine import make_machine
from tools.plan.points import Point, read_points

SIZES, TOKENS = (1e8, 4e8, 1.6e9), (5e9, 2e10, 1e11)
OURS = Law(1.2, 300.0, 500.0, 0.30, 0.32, "made for this test")
NAMES = ("E", "A", "B", "alpha", "beta")


def points(sizes, tokens, law=HOFFMANN, noise=0.0, seed=0):
    generator = np.random.default_rng(seed)
    return [
        Point("run", "data", int(n), d, float(law.loss(n, d) * np.exp(noise * generator.standard_normal())))
        for n in sizes
        for d in tokens
    ]


def record(iters=400, loss=3.0, parameters=10_000_000, **other):
    rows = [
        {
            "iter": i,
            "loss": loss,
            "warmup": i == 0,
            "mfu": {
                "mfu": mfu,
                "mfu_percent": 100 * mfu,
                "tokens_per_sec": 1e6,
                "hardware_peak_flops": 8 * 989.4e12,
                "num_gpus": 8,
                "gpu_name": "NVIDIA H200",
                "calculation_method": "component_summation_v2025",
            },
        }
        for i, mfu in enumerate((0.01, 0.58, 0.60, 0.62))
    ]
    return {
        "run_name": "run_20260101_120000",
        "config": {"dataset": "quickstart", "vocab_size": 4096, "max_iters": iters},
        "startup_info": {"model": {"total_params": parameters}, "tokens_per_iter": 1024},
        "training_iterations": rows,
        "eval_steps": [{"iter": iters, "val_loss": loss}],
    } | other


@pytest.fixture
def save(tmp_path):
    """save(record, ...): the paths of run records, each in a folder of its own."""

    def save(*records):
        paths = []
        for content in records:
            folder = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            paths.append(folder / "run_20260101_120000.json")
            paths[-1].write_text(content if isinstance(content, str) else json.dumps(content))
        return paths

    return save


# --- the fit ---


def test_nine_runs_of_three_sizes_and_three_numbers_of_tokens_give_back_all_constants():
    found = fit(points(SIZES, TOKENS, OURS))
    assert found.constants == 5
    for name in NAMES:
        assert getattr(found.law, name) == pytest.approx(getattr(OURS, name), rel=1e-6)


def test_the_90_percent_intervals_of_noisy_runs_mostly_hold_the_truth():
    """Of 8 sets of runs, 5 or more for each constant: fewer happen once in 200 times at 90 %."""
    fits = [fit(points(SIZES, TOKENS, noise=1e-3, seed=seed)) for seed in range(8)]
    for name in NAMES:
        intervals = [each.interval(name) for each in fits]
        assert sum(low < getattr(HOFFMANN, name) < high for low, high in intervals) >= 5, (name, intervals)
    losses = [each.loss_interval(1e9, 2e10) for each in fits]
    assert sum(low < HOFFMANN.loss(1e9, 2e10) < high for low, high in losses) >= 5, losses
    assert all(high - low < 0.02 for low, high in losses)


def test_one_run_that_went_wrong_hardly_moves_the_fit():
    good = points(SIZES, TOKENS)
    bad = [*good[:4], Point("run", "data", good[4].parameters, good[4].tokens, 1.1 * good[4].loss), *good[5:]]
    assert bad[4].loss - good[4].loss > 0.2
    # least squares would move by 0.054
    assert fit(bad).law.loss(1e9, 2e10) == pytest.approx(HOFFMANN.loss(1e9, 2e10), abs=5e-3)


def test_two_numbers_of_tokens_determine_three_constants_only():
    law = Law(1.0, 300.0, 350.0, HOFFMANN.alpha, HOFFMANN.beta, "made for this test")
    found = fit(points((1e6, 3e6, 1e7), (1e7, 1e8), law))
    assert found.constants == 3
    assert (found.law.alpha, found.law.beta) == (HOFFMANN.alpha, HOFFMANN.beta)
    for name in ("E", "A", "B"):
        assert getattr(found.law, name) == pytest.approx(getattr(law, name), rel=1e-6)


@pytest.mark.parametrize(
    ("sizes", "tokens"), [((1e8,), TOKENS), (SIZES, (5e9,)), ((1e8, 2e8, 4e8, 8e8), (1e9,)), ((1e8,), (1e9,))]
)
def test_runs_that_cannot_tell_size_from_tokens_are_refused(sizes, tokens):
    with pytest.raises(UserError, match="4 runs or more, of 2 sizes"):
        fit(points(sizes, tokens))


# --- records ---


def test_a_point_is_the_last_validation_loss_after_all_tokens(save):
    (point,) = read_points(save(record(400, 3.25)))
    assert (point.parameters, point.tokens, point.loss) == (10_000_000, 400 * 1024, 3.25)
    assert point.warning is None


def test_a_loss_before_the_end_of_the_decay_has_a_warning(save):
    stopped = record() | {"eval_steps": [{"iter": 200, "val_loss": 4.0}]}
    assert "decays until 400" in read_points(save(stopped))[0].warning


def test_the_record_of_an_earlier_attempt_is_left_out(save):
    (path,) = save(record())
    attempts = [{"run_name": "run_20260101_120000"}, {"run_name": "run_20260102_120000"}]
    later = record(loss=2.9, run_name="run_20260102_120000", attempts=attempts)
    newer = path.with_name("run_20260102_120000.json")
    newer.write_text(json.dumps(later))
    assert [point.loss for point in read_points([path, newer])] == [2.9]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (json.dumps(record())[:300], "is no run record"),
        ({"training_iterations": None}, "no list of training_iterations"),
        (record(eval_steps=[]), "no validation loss; train it with an --eval_interval"),
        (record(eval_steps=[{"iter": 0, "val_loss": 8.0}]), "after how many tokens"),
        (record(eval_steps=[{"iter": 9, "val_loss": -1.0}]), "which is none of a language model"),
        (record(startup_info={}), "an older log, or of another program"),
        (record(startup_info={"model": {"total_params": 5}}), "after how many tokens"),
        (
            record(startup_info=record()["startup_info"] | {"pretrained": {"source": "hub"}}),
            "began with trained weights",
        ),
    ],
)
def test_a_record_without_what_a_fit_needs_is_named(save, content, says):
    (path,) = save(content)
    with pytest.raises(UserError, match=says) as raised:
        read_points([path])
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_runs_of_different_data_are_not_fitted_together(save):
    other = record(config={"dataset": "shakespeare", "vocab_size": 4096})
    with pytest.raises(UserError, match="one dataset and vocabulary"):
        read_points(save(record(), other))


def test_the_command_fits_six_runs_and_plans_with_their_law(save, capsys):
    law = Law(1.0, 300.0, 350.0, HOFFMANN.alpha, HOFFMANN.beta, "made for this test")
    runs = [
        record(iters, law.loss(n, 1024 * iters), n) for n in (10**6, 3 * 10**6, 10**7) for iters in (100, 900)
    ]
    flags = ["--fit", *map(str, save(*runs)), "--flops=1e15", "--arch=qwen3"]
    plan_command.main([*flags, "--vocab_size=4096", "--block_size=128"])
    printed = capsys.readouterr().out
    assert "Fit to 6 runs" in printed and "(fitted to 6 runs;" in printed
    assert [line.split()[1:] for line in printed.splitlines() if line.startswith("alpha ")] == [
        ["0.34", "fixed"]
    ]
    assert "90 % interval of the predicted loss (qwen3)" in printed
    assert "fitted to the data and tokenizer of quickstart, vocabulary of 4096" in printed


# --- the machine ---


def test_a_stated_mfu_makes_hours_into_flops():
    machine = make_machine("8xH200", 0.61, [])
    assert 72 * machine.flops_per_hour == pytest.approx(8 * 989.4e12 * 0.61 * 72 * 3600)
    assert machine.hours(72 * machine.flops_per_hour) == pytest.approx(72)


def test_the_mfu_of_records_is_the_median_after_warm_up(save):
    (path,) = save(record())
    assert make_machine("8xH200", None, [path]).mfu == pytest.approx(0.60)
    other = make_machine("16xB200", None, [path])
    assert other.mfu == pytest.approx(0.60) and "on 8 x NVIDIA H200" in other.mfu_source
    own = make_machine(None, None, [path])
    assert (own.gpus, own.name, own.peak_flops) == (8, "NVIDIA H200", pytest.approx(989.4e12))


def test_records_of_several_machines_need_the_gpus_stated(save):
    other = json.loads(json.dumps(record()).replace("H200", "H100 80GB HBM3"))
    paths = save(record(), other)
    with pytest.raises(UserError, match="several machines"):
        make_machine(None, None, paths)
    assert "2 runs" in make_machine("8xH200", None, paths).mfu_source


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (record(training_iterations=[{"iter": 1, "mfu": None, "mfu_reason": "a CPU"}]), "a CPU"),
        (
            json.dumps(record()).replace("component_summation_v2025", "nanogpt_legacy_v1"),
            "cannot be recounted",
        ),
        (json.dumps(record()).replace('"num_gpus": 8', '"sparse_mode": true'), "2:4 sparse"),
        (json.dumps(record()).replace('"num_gpus": 8', '"x": 8'), "of how many GPUs"),
    ],
)
def test_a_record_without_a_usable_mfu_is_named(save, content, says):
    (path,) = save(content)
    with pytest.raises(UserError, match=says) as raised:
        make_machine("8xH200", None, [path])
    assert str(path) in str(raised.value)
