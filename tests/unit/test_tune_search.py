"""The climb of tools.tune, with a function of the settings in place of train.py."""

import itertools
from dataclasses import replace
from importlib import metadata

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
    QUACK_RUNG,
    STRATEGY,
    Ladder,
    OutOfTime,
)
from tools.tune.settings import PARTS, RECOMPUTATION, STRATEGIES

OOM = {"reason": "out of GPU memory", "measurement": None}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("tune"))


class Climb:
    """A ladder with its steps, and the settings of its runs."""

    def __init__(
        self, settings, speed=speed_of, fits=lambda setting: True, noise=lambda run: 0.0, most=10**6
    ):
        self.speed, self.fits, self.noise, self.most = speed, fits, noise, most
        self.calls, self.steps = [], []
        self.ladder = Ladder(settings, self.measure, self.steps.append)

    def measure(self, setting):
        if len(self.calls) >= self.most:
            raise OutOfTime
        self.calls.append(setting)
        return good(self.speed(setting), self.noise(len(self.calls))) if self.fits(setting) else OOM

    def run(self):
        return self.ladder.climb()

    def kept(self):
        return [step.rung for step in self.steps if step.kept]


def one_gpu(config, **keys):
    """On one GPU, with a stated micro-batch: only recomputation, parts of the loss and graphs are open."""
    return make_settings(config, processes=1, **{"fixed": {"batch_size"}, **keys})


def every_setting(settings):
    """All settings that are possible here and fit by the estimate."""
    for batch, level, parts, strategy, graphs in itertools.product(
        settings.batches, RECOMPUTATION, PARTS, settings.strategies.values(), (False, True)
    ):
        made = {"batch_size": batch, "activation_checkpointing": level, "loss_chunks": parts}
        setting = settings.as_it_is | made | strategy | {"use_cuda_graphs": graphs}
        if settings.is_possible(setting):
            yield setting


@pytest.mark.parametrize("processes", [1, 2])
def test_the_best_of_all_settings_is_found_with_few_trials(config, processes):
    settings = make_settings(config, processes=processes)
    climb = Climb(settings)
    found = climb.run()
    speeds = [speed_of(setting) for setting in every_setting(settings)]
    assert speed_of(found) == pytest.approx(max(speeds), rel=1e-9) and found["batch_size"] == 16
    assert len(speeds) > 10 * len(climb.calls) and climb.ladder.finished
    kept = climb.kept()
    assert kept[0] == CAREFUL and kept[-1] == LAST and BATCH in kept and GRAPHS in kept
    assert (STRATEGY in kept) == (processes == 2)
    for setting in climb.calls:
        assert settings.is_possible(setting)
        assert settings.config(setting).samples_per_iter(processes) * 2048 == config.tokens_per_iter
        assert settings.trial_keys(setting)["gradient_accumulation_steps"] <= 131_072 // 2048


def test_what_is_only_within_noise_is_left_out(config):
    """Every setting has the same speed, and runs differ by up to 0.4 %."""
    wave = (0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003)
    climb = Climb(make_settings(config), lambda setting: 1000.0, noise=lambda run: wave[run % len(wave)])
    assert climb.run() == climb.ladder.settings.as_it_is, "the config stays"


@pytest.mark.parametrize(("gain", "is_kept"), [(1.02, True), (1.006, True), (1.004, False)])
def test_a_step_counts_if_it_gains_more_than_equal_runs_differ_by(config, gain, is_kept):
    speed = {True: 1e6 * gain, False: 1e6}
    climb = Climb(one_gpu(config), lambda setting: speed[setting["use_cuda_graphs"]])
    assert climb.run()["use_cuda_graphs"] == is_kept == (GRAPHS in climb.kept())
    graphs = climb.ladder.settings.as_it_is | {"use_cuda_graphs": True}
    assert climb.calls.count(graphs) == (3 if is_kept else 1), "what is kept is repeated at the end"


@pytest.mark.parametrize(
    ("gain", "installed", "fixed", "is_kept"),
    [(1.03, True, (), True), (1.015, True, (), False), (1.03, False, (), False)]
    + [(1.03, True, {"ffn_backend"}, False)],
)
def test_quack_is_tried_where_it_is_installed_and_kept_if_it_gains_two_percent(
    config, monkeypatch, gain, installed, fixed, is_kept
):
    def version(package):
        if not installed:
            raise metadata.PackageNotFoundError(package)
        return "0.6.5"

    monkeypatch.setattr(metadata, "version", version)
    settings = one_gpu(replace(config, dtype="bfloat16"), fixed={"batch_size", *fixed})
    climb = Climb(settings, lambda setting: 1e6 * (gain if setting["ffn_backend"] == "quack" else 1))
    assert (climb.run()["ffn_backend"] == "quack") == is_kept == (QUACK_RUNG in climb.kept())
    tried = [setting for setting in climb.calls if setting["ffn_backend"] == "quack"]
    assert bool(tried) == (installed and not fixed)
    assert all("QuACK" in settings.name(setting) for setting in tried)


@pytest.mark.parametrize(("wobble", "is_kept"), [(0.0001, True), (0.02, False)])
def test_a_gain_by_which_the_rows_of_a_run_differ_too_is_none(config, wobble, is_kept):
    climb = Climb(one_gpu(config))

    def measure(setting):
        run = good(1.02e6 if setting["use_cuda_graphs"] else 1e6)
        rows = run["measurement"]["tokens_per_sec"]
        run["measurement"]["tokens_per_sec"] = [
            rows[1] * (1 + step * wobble) for step in (-2, -1, 0, 0, 1, 2)
        ]
        return run

    climb.ladder.measure = measure
    climb.run()
    assert (GRAPHS in climb.kept()) == is_kept


@pytest.mark.parametrize("fails", ["the best", "the config"])
def test_a_gain_whose_repeats_fail_is_not_kept(config, fails):
    climb = Climb(one_gpu(config))
    climb.fits = lambda s: climb.calls.count(s) < 2 or s["use_cuda_graphs"] != (fails == "the best")
    climb.speed = lambda s: 1.009e6 if s["use_cuda_graphs"] else 1e6
    assert not climb.run()["use_cuda_graphs"] and climb.ladder.finished
    assert not climb.steps[-1].kept and climb.steps[-1].note == f"a repeat failed: {OOM['reason']}"


@pytest.mark.parametrize("parts", [3, 32])
def test_a_stated_number_of_parts_of_the_loss_stays(config, parts):
    settings = one_gpu(replace(config, loss_chunks=parts), fixed={"loss_chunks"})
    assert settings.careful()["loss_chunks"] == parts
    assert {found["loss_chunks"] for found in settings.fit(settings.as_it_is, 1)} == {parts}


@pytest.mark.parametrize("limit", [6, 8, 16, 24])
def test_running_out_of_memory_is_data_and_a_large_micro_batch_is_found(config, limit):
    """The estimate says that all fit; the GPU has less."""
    batch = "batch_size"
    climb = Climb(one_gpu(config, fixed=()), lambda s: 1e6 * s[batch], lambda s: s[batch] <= limit)
    assert limit / 2 < climb.run()[batch] <= limit
    assert any(step.note == OOM["reason"] for step in climb.steps) and climb.ladder.finished


def test_what_runs_out_of_memory_is_tried_with_more_recomputation(config):
    settings = one_gpu(config, fixed={"loss_chunks"})
    level = "activation_checkpointing"
    found = Climb(settings, fits=lambda s: s[level] != "none" or s["batch_size"] <= 4).run()
    assert (found["batch_size"], found[level]) == (16, "memory_bound")


@pytest.mark.parametrize("gib", [2.6, 2.8])
def test_nothing_is_started_that_does_not_fit_by_the_estimate(config, gib):
    climb = Climb(make_settings(config, gib=gib))
    climb.run()
    assert all(climb.ladder.settings.is_possible(setting) for setting in climb.calls)
    assert any(step.note == NO_ROOM for step in climb.steps)
    with pytest.raises(UserError, match="no setting of this config fits NVIDIA H200 with 1.0 GiB"):
        Climb(make_settings(config, gib=1.0)).run()


def test_a_key_that_is_stated_stays(config):
    fixed = {"activation_checkpointing", "use_fsdp", "use_cuda_graphs"}
    climb = Climb(make_settings(config, fixed=fixed))
    found, own = climb.run(), climb.ladder.settings.as_it_is
    for setting in [found, *climb.calls]:
        assert all(setting[key] == own[key] for key in {*fixed, *STRATEGIES["DDP"]})
    assert found["batch_size"] == 16


@pytest.mark.parametrize("most", range(1, 12))
def test_the_best_so_far_is_returned_whenever_the_time_is_over(config, most):
    climb = Climb(make_settings(config), most=most)
    found = climb.run()
    assert found in climb.calls and speed_of(found) >= speed_of(climb.ladder.settings.as_it_is)
    assert most < 3 or speed_of(found) >= 0.99 * max(map(speed_of, climb.calls))
    assert not climb.ladder.finished


def test_a_budget_that_ends_in_the_last_repeats_loses_nothing(config):
    whole = Climb(make_settings(config))
    best = whole.run()
    short = Climb(make_settings(config), most=len(whole.calls) - 1)
    assert short.run() == best and not short.ladder.finished


def test_without_a_trial_there_is_no_result(config):
    with pytest.raises(UserError, match="budget was over before a trial was finished"):
        Climb(make_settings(config), most=0).run()
    with pytest.raises(UserError, match="no trial succeeded, not even the most careful one: out of GPU"):
        Climb(make_settings(config), fits=lambda setting: False).run()


def test_the_config_stays_if_it_is_the_fastest(config):
    climb = Climb(one_gpu(config, fixed=()))
    own = climb.ladder.settings.as_it_is
    climb.speed = lambda s: 2e6 if s == own else speed_of(s) / 10
    assert climb.run() == own
    assert climb.steps[0].rung == AS_IT_IS and not climb.steps[-1].kept
