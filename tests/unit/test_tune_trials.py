"""What tools.tune keeps of its trials, and when it starts one: with a function in place of train.py."""

import argparse
import itertools

import pytest
from support.helpers import SMALL, write_config
from support.tuning import good, make_config, make_settings, speed_of

from tools.tune import trials as trials_module
from tools.tune.ladder import Ladder
from tools.tune.settings import TUNED
from tools.tune.trials import OUT_OF_MEMORY, Trials
from training.configuration.files_and_flags import load_config


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_config(tmp_path_factory.mktemp("tune"))


class Killed(BaseException):
    pass


@pytest.fixture
def runner(monkeypatch):
    """run_entry() without a process; `left` says after how many runs it is killed."""
    state = argparse.Namespace(left=10**6, ran=0)

    def run_entry(entry, number, folder, arguments, entries):
        if not state.left:
            raise Killed
        state.left -= 1
        state.ran += 1
        keys = dict(flag.removeprefix("--").split("=", 1) for flag in entry.argv if flag.startswith("--"))
        made = load_config([entry.argv[0]], 2).to_dict()
        setting = {key: KEYS_OF[key](keys[key]) if key in keys else made[key] for key in TUNED}
        rows = list(good(speed_of(setting)).tokens_per_sec)
        measured = {"tokens_per_sec": rows, "mfu_percent": [50.0], "max_allocated_gb": 9.0}
        entry.runs.append({"reason": None, "seconds": 1.0, "measurement": measured})

    monkeypatch.setattr(trials_module, "run_entry", run_entry)
    monkeypatch.setattr(trials_module, "git_state", lambda: {"commit": "c0ffee"})
    return state


def read_value(text):
    return {"True": True, "False": False, "None": None}.get(text, int(text) if text.isdigit() else text)


KEYS_OF = dict.fromkeys(TUNED, read_value)


@pytest.fixture
def make_ladder(tmp_path, config):
    keys = {**SMALL, "block_size": 2048, "batch_size": 16, "gradient_accumulation_steps": 3}
    path = write_config(tmp_path / "small.py", **keys, dataset="quickstart")

    def make(budget=1e6, folder=tmp_path / "out"):
        options = argparse.Namespace(budget=budget, iters=8, warmup=4, timeout=60, dataset=None, tokens=None)
        settings = make_settings(config)
        return Ladder(settings, Trials(settings, [str(path)], folder, options).measure)

    return make


def test_a_search_killed_at_any_trial_goes_on_and_finds_the_same(runner, make_ladder, tmp_path):
    clean = make_ladder(folder=tmp_path / "clean")
    found, total = clean.climb(), runner.ran
    runner.ran = 0
    for done in range(total - 1):
        runner.left = 1
        with pytest.raises(Killed):
            make_ladder().climb()
        assert runner.ran == done + 1, "one new trial, and no finished one again"
    runner.left = 1
    again = make_ladder()
    assert again.climb() == found and again.steps == clean.steps


def test_a_damaged_or_missing_result_is_measured_again(runner, make_ladder, tmp_path):
    make_ladder().climb()
    total = runner.ran
    files = sorted((tmp_path / "out/trials").iterdir())
    files[0].write_text('{"tokens_per_sec": [')
    files[1].unlink()
    files[2].write_text('{"tokens_per_sec": [-1], "reason": null}')
    make_ladder().climb()
    assert runner.ran == total + 3


def test_no_trial_is_started_when_the_time_is_over(runner, make_ladder, monkeypatch):
    now = itertools.count(0.0, 10.0)
    monkeypatch.setattr(trials_module.time, "monotonic", lambda: next(now))
    ladder = make_ladder(budget=35.0)
    ladder.climb()
    assert runner.ran == 3 and not ladder.finished


def test_another_machine_or_dataset_is_measured_anew(runner, make_ladder, config):
    make_ladder().climb()
    total = runner.ran
    ladder = make_ladder()
    ladder.settings.machine.facts["torch"] = "another"
    ladder.climb()
    assert runner.ran == 2 * total


def test_a_failure_that_is_not_about_memory_is_tried_again(tmp_path, config, monkeypatch, make_ladder):
    reasons = {"no space left on device": False, "out of GPU memory; state a lower --batch_size": True}
    for reason, kept in reasons.items():
        ladder = make_ladder(folder=tmp_path / str(kept))
        monkeypatch.setattr(
            trials_module, "run_entry", lambda entry, *_, reason=reason: fail(entry, reason, *_)
        )
        ladder.measure(ladder.settings.as_it_is, 1)
        assert len(list((tmp_path / str(kept) / "trials").iterdir())) == kept


def fail(entry, reason, number, folder, *_):
    out = trials_module.run_folder(entry, number, folder)
    out.mkdir(parents=True)
    (out / "console.log").write_text(f"step 1\n[rank 1] error: {reason}\n")
    entry.runs.append({"reason": reason, "seconds": 1.0, "measurement": None})


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
