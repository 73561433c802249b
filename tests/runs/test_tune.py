"""tools.tune as a user runs it, on the CPU: from a config to the tuned one, and what it refuses."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.helpers import SMALL, TINY, last_run, make_dataset, write_config

from bench import runner
from bench.process import Outcome
from common.command import INTERRUPTED, USER_ERROR, run_command
from tools.tune import __main__ as tool
from tools.tune import settings
from tools.tune.ladder import OutOfTime
from training.configuration.files_and_flags import load_config
from training.configuration.keys import ROOT

# two trials are left: micro-batches of 4, as the config has it, and of 2
FEW = ("--iters=2", "--warmup=1", "--compile=False", "--activation_checkpointing=none")


@pytest.fixture
def config(tmp_path):
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "peak_tflops": 1.0}
    return write_config(tmp_path / "tiny.py", **keys)


@pytest.fixture
def in_process(run, monkeypatch):
    """Trials train in this process; started: their arguments."""
    started = []

    def run_process(command, log, timeout_s, keep_cache=False):
        target = command[command.index("train.py") :]
        started.append(target)
        status = run(*target[1:])
        log.write_text("error: as its log says\n")
        return Outcome(1.0, None if status == 0 else "as its log says")

    monkeypatch.setattr(runner, "run_process", run_process)
    return started


def tune(config, tmp_path, *arguments):
    files = (f"--out_dir={tmp_path / 'out'}", f"--write={tmp_path / 'tuned_tiny.py'}")
    return run_command(tool.main, [str(config), *files, *arguments])


def test_the_tuned_config_trains_with_the_tokens_of_the_config(config, tmp_path, in_process, run, capsys):
    assert tune(config, tmp_path, *FEW) == 0
    printed = capsys.readouterr().out
    tuned = tmp_path / "tuned_tiny.py"
    text = tuned.read_text()
    assert "careful" in printed and "Best: " in printed
    assert "CUDA Graphs" not in printed, "a CPU has none"
    for word in (tool.MARK, "python -m tools.tune", "tokens/s", "MFU", "Measured 20"):
        assert word in text, word
    assert "\n\n\n" not in text and not any(line.endswith(" ") for line in text.splitlines())
    count = len(in_process)
    trained = [load_config(target[1:]) for target in in_process]
    assert {one.samples_per_iter(1) for one in trained} == {4}
    assert {one.micro_batch for one in trained} >= {1, 4}, "the careful one, and the config as it is"
    assert tune(config, tmp_path, *FEW) == USER_ERROR and len(in_process) == count, "its folder has trials"
    assert run(tuned, f"--out_dir={tmp_path / 'run'}") == 0
    record = last_run(tmp_path / "run")["config"]
    assert record["tokens_per_iter"] == 128 and not record["compile"]
    assert record["eval_batch_size"] == 4, "as before, whatever the micro-batch"
    assert record["learning_rate"] == TINY["learning_rate"], "what was not tuned is as in the config"


@pytest.mark.parametrize("trial", range(3))
def test_ctrl_c_says_the_best_so_far_and_writes_no_config(
    trial, config, tmp_path, in_process, monkeypatch, capsys
):
    """One run against one shows no gain. After the first trial there is a best one."""
    clean = runner.run_process

    def interrupted(*arguments):
        if len(in_process) == trial:
            raise KeyboardInterrupt
        return clean(*arguments)

    monkeypatch.setattr(runner, "run_process", interrupted)
    assert tune(config, tmp_path, *FEW) == INTERRUPTED
    printed, tuned = capsys.readouterr(), tmp_path / "tuned_tiny.py"
    assert len(in_process) == trial and not tuned.exists()
    if trial:
        assert "Best: " in printed.out and "The time was over before the last rung" in printed.out
        assert printed.err.startswith("interrupted; no config was written: the repeats are missing")


@pytest.mark.parametrize("most", [1, 2])
def test_a_budget_that_ends_before_the_repeats_writes_no_config(
    most, config, tmp_path, in_process, monkeypatch, capsys
):
    clean = runner.run_process

    def is_over(*arguments):
        if len(in_process) == most:
            raise OutOfTime
        return clean(*arguments)

    monkeypatch.setattr(runner, "run_process", is_over)
    assert tune(config, tmp_path, *FEW) == USER_ERROR
    printed = capsys.readouterr()
    assert "no config was written: the repeats are missing" in printed.err
    assert "Best: " in printed.out and not (tmp_path / "tuned_tiny.py").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config/no_such.py"], "cannot read the config file config/no_such.py"),
        (["config/full_qwen3_1.8b_optimal.py", "--nproc=8"], "needs as many GPUs, but torch sees 2"),
        (["config/quickstart.py", "--dry_run=True"], "dry_run is the benchmark's to set"),
        (["config/quickstart.py", "--learning_rat=1"], "did you mean 'learning_rate'?"),
        (["config/quickstart.py", "--write=LICENSE"], "was not written by tools.tune"),
        (["config/quickstart.py", "--budget=5s"], "no time of 10s or more"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, in_process, monkeypatch, capsys):
    monkeypatch.setattr(settings.torch.cuda, "device_count", lambda: 2)
    assert run_command(tool.main, arguments) == USER_ERROR
    assert message in capsys.readouterr().err and not in_process


def test_a_gpu_that_others_use_is_refused(config, monkeypatch):
    memory = settings.look_at(load_config([str(config)]), 1)
    gib = settings.GIB
    free = {0: 79.1 * gib, 1: 40 * gib}
    monkeypatch.setattr(settings.torch.cuda, "mem_get_info", lambda number: (free[number], 80 * gib))
    monkeypatch.setattr(settings, "device_memory", lambda device, processes: memory)
    futures = settings.concurrent.futures
    monkeypatch.setattr(futures, "ProcessPoolExecutor", lambda count, context: ThreadPoolExecutor(count))
    monkeypatch.setattr(settings.torch.cuda, "device_count", lambda: 2)
    on_gpu = load_config([str(config), "--device=cuda"])
    assert settings.look_at(on_gpu, 1) == memory
    with pytest.raises(ValueError, match="GPU 1 is in use: 40.0 GiB"):
        settings.look_at(on_gpu, 2)


@pytest.mark.gpu
def test_a_tiny_model_is_tuned_on_a_gpu(tmp_path):
    """Minutes: real processes, and a result that states the memory of the GPU."""
    keys = {**SMALL, "dataset": make_dataset(tmp_path / "tokens"), "batch_size": 16}
    path = write_config(tmp_path / "small.py", **keys)
    torch.cuda.empty_cache()  # what earlier tests have left: tools.tune wants a free GPU
    command = [sys.executable, "-m", "tools.tune", str(path), "--budget=5m", f"--out_dir={tmp_path / 'out'}"]
    command += [f"--write={tmp_path / 'tuned.py'}", "--compile=True", "--iters=20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "is in use" in done.stdout + done.stderr:
        pytest.skip("tests of other processes use the GPU; run this one alone: -p no:xdist, or -n 1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    header = (tmp_path / "tuned.py").read_text()
    assert "1 x NVIDIA" in header and "MFU" in header
    assert load_config([str(tmp_path / "tuned.py")]).samples_per_iter is not None
