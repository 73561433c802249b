"""When tools.tune starts a trial, and what it learns from it: with a function in place of train.py."""

import argparse
import itertools

import pytest
from support.tuning import make_config, make_settings

from tools.tune import trials as trials_module
from tools.tune.ladder import OutOfTime
from tools.tune.trials import GRAPHED_FROM, OUT_OF_MEMORY, Trials


@pytest.fixture
def make_trials(tmp_path, monkeypatch):
    """make_trials(what a run ends with, an error or a measurement); started: its arguments."""

    def make(ends_with, budget=1e6):
        started = []

        def run_entry(entry, number, folder, options, entries):
            started.append((number, entry.argv, options.warmup))
            reason = ends_with if isinstance(ends_with, str) else None
            out = trials_module.run_folder(entry, number, folder)
            out.mkdir(parents=True)
            (out / "console.log").write_text(f"step 1\n[rank 1] error: {reason}\n")
            entry.runs.append({"reason": reason, "measurement": None if reason else ends_with})

        monkeypatch.setattr(trials_module, "run_entry", run_entry)
        options = argparse.Namespace(budget=budget, iters=8, warmup=4, timeout=60, tokens=None)
        settings = make_settings(make_config(tmp_path))
        return Trials(settings, ["small.py"], tmp_path / "out", options), settings.as_it_is, started

    return make


def test_a_trial_has_the_settings_and_only_the_figures_are_kept(make_trials):
    measured = {"tokens_per_sec": [10.0, 12.0], "mfu_percent": [50.0, 52.0], "max_allocated_gb": 9.0}
    trials, setting, started = make_trials(measured)
    result = trials.measure(setting | {"use_cuda_graphs": True})
    assert (result.speed, result.mfu_percent, result.memory_gib) == (11.0, 51.0, 9.0)
    trials.measure(setting)
    (first, argv, graphed), (second, _, warmup) = started
    assert (first, second, graphed, warmup) == (1, 2, GRAPHED_FROM, 4), "replays are timed, not the capture"
    assert argv[0] == "small.py" and {
        f"--batch_size={setting['batch_size']}",
        "--use_cuda_graphs=True",
    } < set(argv)


def test_no_trial_is_started_when_the_time_is_over(make_trials, monkeypatch):
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(trials_module.time, "monotonic", lambda: next(now))
    trials, setting, started = make_trials("lost", budget=25.0)
    for _ in range(2):
        trials.measure(setting)
    with pytest.raises(OutOfTime):
        trials.measure(setting)
    assert len(started) == 2


@pytest.mark.parametrize(
    ("reason", "is_memory"), [("no space left on device", False), ("out of GPU memory; state less", True)]
)
def test_a_failed_trial_says_whether_memory_was_the_reason(make_trials, reason, is_memory):
    trials, setting, _ = make_trials(reason)
    result = trials.measure(setting)
    assert result.reason == reason and result.out_of_memory == is_memory


@pytest.mark.parametrize(
    ("text", "is_memory"),
    [
        ("error: out of GPU memory; state a lower --batch_size", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: CUDA error: out of memory", True),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", True),
        ("error: no dataset 'memory' in data/", False),
    ],
)
def test_out_of_memory_is_recognized(text, is_memory):
    assert bool(OUT_OF_MEMORY.search(f"first line\n{text}\n".encode())) == is_memory
