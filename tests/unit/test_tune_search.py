"""The climb of tools.tune, with a function of the settings in place of train.py."""

import itertools
from dataclasses import replace

import pytest
from support.tuning import good, make_config, make_settings, speed_of

from common.errors import UserError
from tools.tune.ladder import (
    AS_IT_IS,
    BATCH,
    CAREFUL,
    GRAPHS,
    LAST,
    NO_ROOM,
    STRATEGY,
    Ladder,
    OutOfTime,
    Result,
)
from tools.tune.settings import PARTS, RECOMPUTATION, STRATEGIES

OOM = Result(reason="out of GPU memory", out_of_memory=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("tune"))


class Measured:
    """measure() of a Ladder; counts its calls."""

    def __init__(self, speed=speed_of, fits=lambda setting: True, noise=lambda run: 0.0, most=10**6):
        self.speed, self.fits, self.noise, self.most, self.calls = speed, fits, noise, most, []

    def __call__(self, setting):
        if len(self.calls) >= self.most:
            raise OutOfTime
        self.calls.append(setting)
        return good(self.speed(setting), self.noise(len(self.calls))) if self.fits(setting) else OOM


def every_setting(settings):
    """All settings that are possible here and fit by the estimate."""
    for batch, level, parts, strategy, graphs in itertools.product(
        settings.batches, RECOMPUTATION, PARTS, settings.strategies.values(), (False, True)
    ):
        made = {"batch_size": batch, "activation_checkpointing": level, "loss_chunks": parts}
        setting = settings.as_it_is | made | strategy | {"use_cuda_graphs": graphs}
        if not settings.obstacle(setting) and settings.fits(setting):
            yield setting


@pytest.mark.parametrize("processes", [1, 2])
def test_the_best_of_all_settings_is_found_with_few_trials(config, processes):
    settings, measured = make_settings(config, processes=processes), Measured()
    ladder = Ladder(settings, measured)
    found = ladder.climb()
    speeds = [speed_of(setting) for setting in every_setting(settings)]
    assert speed_of(found) == pytest.approx(max(speeds), rel=1e-9) and found["batch_size"] == 16
    assert len(speeds) > 10 * len(measured.calls) and ladder.finished
    kept = [step.rung for step in ladder.steps if step.kept]
    assert kept[0] == CAREFUL and kept[-1] == LAST and BATCH in kept and GRAPHS in kept
    assert (STRATEGY in kept) == (processes == 2)


def test_what_is_only_within_noise_is_left_out(config):
    """Every setting has the same speed, and runs differ by up to 0.4 %."""
    wave = (0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003)
    measured = Measured(speed=lambda setting: 1000.0, noise=lambda run: wave[run % len(wave)])
    ladder = Ladder(make_settings(config), measured)
    assert ladder.climb() == ladder.settings.as_it_is, "the config stays"
    assert [step.rung for step in ladder.steps if step.kept] == [CAREFUL]


@pytest.mark.parametrize(
    ("gain", "noise", "is_kept", "runs"),
    [
        (1.02, 4e-4, True, 1),
        (1.009, 4e-4, True, 3),
        (1.004, 4e-4, True, 3),
        (1.004, 2e-3, False, 3),
        (1.002, 4e-4, False, 1),
    ],
)
def test_a_small_gain_counts_if_repeats_confirm_it(config, gain, noise, is_kept, runs):
    wave = (0.0, noise, -noise)
    measured = Measured(
        speed=lambda setting: 1e6 * (gain if setting["use_cuda_graphs"] else 1.0),
        noise=lambda run: wave[run % len(wave)],
    )
    ladder = Ladder(make_settings(config, processes=1, fixed={"batch_size"}), measured)
    ladder.climb()
    graphs = next(s for s in ladder.steps if s.rung == GRAPHS and s.setting["use_cuda_graphs"])
    assert graphs.kept == is_kept
    made = measured.calls.count(graphs.setting)
    assert made >= runs if is_kept else made == runs, "what is kept is repeated at the end, too"


@pytest.mark.parametrize("fails", ["the best", "the config"])
def test_a_gain_whose_repeats_fail_is_not_kept_and_the_climb_goes_on(config, fails):
    graphs, calls = fails == "the best", []

    def measure(setting):
        calls.append(setting)
        if calls.count(setting) > 1 and setting["use_cuda_graphs"] == graphs:
            return OOM
        speed = 1.009 if setting["use_cuda_graphs"] else 1.0
        return Result((1e6 * speed,) * 5, 10.0, 50.0)

    ladder = Ladder(make_settings(config, processes=1, fixed={"batch_size"}), measure)
    assert not ladder.climb()["use_cuda_graphs"] and ladder.finished
    step = next(s for s in ladder.steps if s.rung == GRAPHS and s.setting["use_cuda_graphs"])
    assert not step.kept and (step.note == f"run 2 failed: {OOM.reason}") == graphs


@pytest.mark.parametrize("parts", [3, 32])
def test_a_stated_number_of_parts_of_the_loss_stays(config, parts):
    settings = make_settings(replace(config, loss_chunks=parts), processes=1, fixed={"loss_chunks"})
    assert settings.careful()["loss_chunks"] == parts
    assert {found["loss_chunks"] for found in settings.fit(settings.as_it_is, 1)} == {parts}


@pytest.mark.parametrize(("wobble", "runs"), [(0.0001, 1), (0.02, 3)])
def test_a_gain_by_which_the_rows_of_a_run_differ_too_is_repeated(config, wobble, runs):
    calls, made = [], {}

    def measure(setting):
        calls.append(setting)
        speed = 1.02e6 if setting["use_cuda_graphs"] else 1e6
        return Result(tuple(speed * (1 + steps * wobble) for steps in (-2, -1, 0, 0, 1, 2)), 10.0, 50.0)

    def report(step):
        made.setdefault((step.rung, step.setting["use_cuda_graphs"]), calls.count(step.setting))

    Ladder(make_settings(config, processes=1, fixed={"batch_size"}), measure, report).climb()
    assert made[GRAPHS, True] == runs


@pytest.mark.parametrize(("rate", "is_tried"), [(1e6, True), (1e4, False)])
def test_cuda_graphs_are_tried_only_where_the_gpu_may_wait_for_launches(config, rate, is_tried):
    """16 x 2048 tokens take 33 ms or 3.3 s."""
    measured = Measured(speed=lambda setting: rate * (1.04 if setting["use_cuda_graphs"] else 1.0))
    ladder = Ladder(make_settings(config, processes=1, fixed={"batch_size"}), measured)
    found = ladder.climb()
    step = next(step for step in ladder.steps if step.setting["use_cuda_graphs"])
    assert bool(step.result) == is_tried == found["use_cuda_graphs"]
    assert is_tried or "s: nothing to gain" in step.note


@pytest.mark.parametrize("limit", [6, 8, 16, 24])
def test_running_out_of_memory_is_data_and_a_large_micro_batch_is_found(config, limit):
    """The estimate says that all fit; the GPU has less."""
    measured = Measured(
        lambda setting: 1e6 * setting["batch_size"], lambda setting: setting["batch_size"] <= limit
    )
    ladder = Ladder(make_settings(config, processes=1), measured)
    assert limit / 2 < ladder.climb()["batch_size"] <= limit
    assert any(step.note == OOM.reason for step in ladder.steps) and ladder.finished


def test_what_runs_out_of_memory_is_tried_with_more_recomputation(config):
    measured = Measured(fits=lambda s: s["activation_checkpointing"] != "none" or s["batch_size"] <= 4)
    ladder = Ladder(make_settings(config, processes=1, fixed={"loss_chunks"}), measured)
    found = ladder.climb()
    assert (found["batch_size"], found["activation_checkpointing"]) == (16, "memory_bound")


@pytest.mark.parametrize("gib", [2.6, 2.8, 139.8])
def test_nothing_is_started_that_does_not_fit_by_the_estimate(config, gib):
    settings, measured = make_settings(config, gib=gib), Measured()
    ladder = Ladder(settings, measured)
    ladder.climb()
    assert all(settings.fits(setting) for setting in measured.calls)
    assert gib > 100 or any(step.note == NO_ROOM for step in ladder.steps)


def test_where_nothing_fits_the_error_names_what_does(config):
    with pytest.raises(UserError, match="no setting of this config fits NVIDIA H200 with 1.0 GiB"):
        Ladder(make_settings(config, gib=1.0), Measured()).climb()


def test_a_key_that_is_stated_stays(config):
    fixed = {"activation_checkpointing", "use_fsdp", "use_cuda_graphs"}
    settings, measured = make_settings(config, fixed=fixed), Measured()
    found = Ladder(settings, measured).climb()
    kept = {*fixed, *STRATEGIES["DDP"]}
    for setting in [found, *measured.calls]:
        assert all(setting[key] == settings.as_it_is[key] for key in kept)
    assert found["batch_size"] == 16


def test_the_tokens_of_an_iteration_stay(config):
    settings, measured = make_settings(config), Measured()
    Ladder(settings, measured).climb()
    for setting in measured.calls:
        assert settings.config(setting).samples_per_iter(2) * 2048 == config.tokens_per_iter
        assert settings.trial_keys(setting)["gradient_accumulation_steps"] <= 131_072 // 2048


@pytest.mark.parametrize("most", range(1, 12))
def test_the_best_so_far_is_returned_whenever_the_time_is_over(config, most):
    measured = Measured(most=most)
    ladder = Ladder(make_settings(config), measured)
    found = ladder.climb()
    tried = [speed_of(setting) for setting in measured.calls]
    assert found in measured.calls and speed_of(found) >= speed_of(ladder.settings.as_it_is)
    assert most < 3 or speed_of(found) >= 0.99 * max(tried) and not ladder.finished


def test_without_a_trial_there_is_no_result(config):
    with pytest.raises(UserError, match="budget was over before a trial was finished"):
        Ladder(make_settings(config), Measured(most=0)).climb()
    with pytest.raises(UserError, match="no trial succeeded, not even the most careful one: out of GPU"):
        Ladder(make_settings(config), Measured(fits=lambda setting: False)).climb()


def test_the_config_stays_if_it_is_the_fastest(config):
    settings = make_settings(config, processes=1)
    measured = Measured(speed=lambda s: 2e6 if s == settings.as_it_is else speed_of(s) / 10)
    ladder = Ladder(settings, measured)
    assert ladder.climb() == settings.as_it_is
    assert ladder.steps[0].rung == AS_IT_IS and not ladder.steps[-1].kept
