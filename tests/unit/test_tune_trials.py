"""When tools.tune starts a trial, and with what: with a function in place of train.py."""

import argparse
import itertools

import pytest
from support.tuning import good, make_config, make_settings

from tools.tune import trials as trials_module
from tools.tune.ladder import OutOfTime
from tools.tune.trials import GRAPHED_FROM, Trials


@pytest.fixture
def make_trials(tmp_path, monkeypatch):
    """(trials, a setting, the arguments of what was started)."""

    def make(budget=1e6):
        started = []

        def run_entry(entry, number, folder, options, entries):
            started.append((number, entry.argv, options.warmup))
            entry.runs.append(good(11.0))

        monkeypatch.setattr(trials_module, "run_entry", run_entry)
        options = argparse.Namespace(budget=budget, iters=8, warmup=4, timeout=60)
        settings = make_settings(make_config(tmp_path))
        return Trials(settings, ["small.py"], tmp_path / "out", options), settings.as_it_is, started

    return make


def test_a_trial_has_the_settings(make_trials):
    trials, setting, started = make_trials()
    assert trials.measure(setting | {"use_cuda_graphs": True}) == good(11.0)
    trials.measure(setting)
    (first, argv, graphed), (second, _, warmup) = started
    assert (first, second, graphed, warmup) == (1, 2, GRAPHED_FROM, 4), "replays are timed, not the capture"
    stated = {f"--batch_size={setting['batch_size']}", "--use_cuda_graphs=True", "--checkpoint_interval=0"}
    assert argv[0] == "small.py" and stated < set(argv)


def test_no_trial_is_started_when_the_time_is_over(make_trials, monkeypatch):
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(trials_module.time, "monotonic", lambda: next(now))
    trials, setting, started = make_trials(budget=25.0)
    for _ in range(2):
        trials.measure(setting)
    with pytest.raises(OutOfTime):
        trials.measure(setting)
    assert len(started) == 2
