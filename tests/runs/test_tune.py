"""tools.tune: the search with a speed for each setting in place of bench.throughput, one real trial, and what
it refuses."""

import itertools
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.helpers import SMALL, TINY, last_run, make_dataset, write_config

from common.command import INTERRUPTED, USER_ERROR, run_command
from tools import trials, tune
from training.configuration.files_and_flags import load_config
from training.configuration.flags import take_flags
from training.configuration.keys import ROOT
from training.memory.gpus import DeviceMemory

OOM = "out of GPU memory"
GAINS = {  # the speed of a value, as a multiple of the slowest one's
    "activation_checkpointing": {"selective": 1.1, "attention": 1.12, "memory_bound": 1.15, "none": 1.2},
    "loss_chunks": {4: 1.005, 1: 1.02},
    "use_cuda_graphs": {True: 1.04},
    "use_zero1": {True: 1.05},
    "use_fsdp": {True: 0.97},
}


def speed_of(config) -> float:
    speed = 1e6 * min(config.batch_size, 16) ** 0.5
    for key, gains in GAINS.items():
        speed *= gains.get(getattr(config, key), 1.0)
    return speed


class Machine:
    """tune(...) runs the command where each trial has the speed that `speed` says, unless it does not fit."""

    def __init__(self, tmp_path, monkeypatch, capsys):
        self.folder, self.capsys = tmp_path, capsys
        self.speed, self.fits, self.gib, self.most = speed_of, lambda config: True, 139.8, 10**6
        self.noise = lambda number: (0.0, 1e-4, 0.0, -1e-4)
        self.trials, self.commands = [], []
        keys = {**SMALL, "batch_size": "auto", "gradient_accumulation_steps": "auto", "dataset": "quickstart"}
        keys |= {"block_size": 2048, "tokens_per_iter": 96 * 2048, "attention_backend": "sdpa"}
        self.config = write_config(tmp_path / "small.py", **keys)
        self.result = tmp_path / "tuned_small.py"
        monkeypatch.setattr(tune, "run_trial", self.run_trial)
        pool = SimpleNamespace(apply=lambda *_: DeviceMemory(self.gib, "NVIDIA H200"))
        context = SimpleNamespace(Pool=lambda count: nullcontext(pool))
        monkeypatch.setattr(tune.multiprocessing, "get_context", lambda name: context)

    def run_trial(self, arguments, folder):
        if len(self.trials) == self.most:
            raise KeyboardInterrupt
        flags, options = take_flags(arguments, ("dataset",))
        self.commands.append(options)
        nproc = next(int(option[8:]) for option in options if option.startswith("--nproc="))
        made = load_config([str(self.config), *flags], nproc)
        self.trials.append(made)
        speed = self.speed(made)
        found = [speed * (1 + noise) for noise in self.noise(len(self.trials))]
        measured = {"tokens_per_sec": found, "mfu_percent": [50.0]}
        run = {"reason": None, "measurement": measured} if self.fits(made) else {"reason": OOM}
        return [{"runs": [run]}]

    def tune(self, *flags, status=0):
        """The tuned config, if one is written."""
        argv = [str(self.config), *flags, f"--out_dir={self.folder / 'out'}", f"--write={self.result}"]
        assert run_command(tune.main, argv) == status
        self.printed = self.capsys.readouterr()
        nproc = next((int(flag[8:]) for flag in flags if flag.startswith("--nproc=")), 1)
        return load_config([str(self.result)], nproc) if status == 0 else None


@pytest.fixture
def machine(tmp_path, monkeypatch, capsys):
    return Machine(tmp_path, monkeypatch, capsys)


# --- the search ---


@pytest.mark.parametrize("processes", [1, 2])
def test_the_fastest_of_all_settings_is_found_with_few_trials(machine, processes):
    found = machine.tune(f"--nproc={processes}")
    assert found.batch_size == 16 and found.activation_checkpointing == "none" and found.use_cuda_graphs
    assert found.use_zero1 == (processes == 2) and not found.use_fsdp and found.loss_chunks == 1
    assert len(machine.trials) <= 24, "of hundreds"
    for made in machine.trials:
        assert made.gradient_accumulation_steps * made.batch_size * 2048 <= 131_072
        assert made.tokens_per_iter is None
    assert found.tokens_per_iter == 96 * 2048 and found.gradient_accumulation_steps == "auto"
    text = machine.result.read_text()
    for word in (tune.MARK, "python -m tools.tune", "tokens/s, MFU 50.00 % (v3), 3 run(s)", "on 20", "H200"):
        assert word in text, word
    assert "Best: --" in machine.printed.out and "kept" in machine.printed.out


def test_replays_are_timed_and_not_the_capture_of_a_graph(machine):
    machine.tune("--iters=8")
    for made, options in zip(machine.trials, machine.commands, strict=True):
        assert (options[-1] == "--warmup=12") == made.use_cuda_graphs
        assert options.index("--iters=8") > options.index("--iters=5") and "--warmup=2" in options


@pytest.mark.parametrize(
    ("gain", "noise", "is_kept"),
    [(1.02, 0.0, True), (1.006, 0.0, True), (1.004, 0.0, False), (1.02, 0.04, False)],
)
def test_a_step_counts_if_it_gains_more_than_equal_runs_and_their_rows_differ_by(
    machine, gain, noise, is_kept
):
    machine.speed = lambda made: 1e6 * (gain if made.use_cuda_graphs else 1)
    machine.noise = lambda number: (-noise, -noise / 2, 0.0, 0.0, noise / 2, noise)
    assert machine.tune("--batch_size=4").use_cuda_graphs == is_kept
    graphed = [made for made in machine.trials if made.use_cuda_graphs]
    assert len(graphed) == (3 if is_kept else 1), "what is kept is repeated at the end"


def test_what_is_only_within_noise_is_left_out(machine):
    wave = (0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003)
    machine.speed, machine.noise = lambda made: 1000.0, lambda number: [wave[number % 7]] * 4
    machine.tune()
    assert "Best: the config as it is" in machine.printed.out


def test_the_last_repeats_decide(machine):
    """One run of the graph was fast by chance."""
    lucky = iter([1.05, 1.0, 0.99])
    machine.speed = lambda made: 1e6 * (next(lucky) if made.use_cuda_graphs else 1)
    assert not machine.tune("--batch_size=4").use_cuda_graphs


@pytest.mark.parametrize("fails", ["the best", "the config"])
def test_a_gain_whose_repeats_fail_is_not_kept(machine, fails):
    def fits(made):
        alike = [one for one in machine.trials if one.use_cuda_graphs == made.use_cuda_graphs]
        return len(alike) < 3 or made.use_cuda_graphs != (fails == "the best")

    machine.fits = fits
    machine.speed = lambda made: 1.02e6 if made.use_cuda_graphs else 1e6
    assert not machine.tune("--batch_size=4", "--activation_checkpointing=none").use_cuda_graphs
    assert OOM in machine.printed.out


@pytest.mark.parametrize("limit", [6, 8, 16, 24])
def test_running_out_of_memory_is_data_and_a_large_micro_batch_is_found(machine, limit):
    """The estimate says that all fit; the GPU has less."""
    machine.speed, machine.fits = lambda made: 1e6 * made.batch_size, lambda made: made.batch_size <= limit
    assert limit / 2 < machine.tune().batch_size <= limit
    assert OOM in machine.printed.out


def test_what_runs_out_of_memory_is_tried_with_more_recomputation(machine):
    machine.fits = lambda made: made.activation_checkpointing != "none" or made.batch_size <= 4
    found = machine.tune()
    assert (found.batch_size, found.activation_checkpointing) == (16, "memory_bound")


def test_nothing_but_the_config_is_started_that_does_not_fit_by_the_estimate(machine):
    machine.gib = 2.6
    machine.tune("--nproc=2")
    assert max(made.batch_size for made in machine.trials) < 32
    machine.gib, machine.fits, count = 1.0, lambda made: False, len(machine.trials)
    machine.folder /= "again"
    machine.tune("--nproc=2", status=USER_ERROR)
    assert "nothing ran on NVIDIA H200 with 1.0 GiB" in machine.printed.err
    assert len(machine.trials) == count + 1 and not (machine.folder / "tuned_small.py").exists()


def test_a_key_that_is_stated_stays(machine):
    flags = {"activation_checkpointing": "full", "use_fsdp": True, "use_cuda_graphs": False, "loss_chunks": 8}
    found = machine.tune("--nproc=2", *(f"--{key}={value}" for key, value in flags.items()))
    for made in [found, *machine.trials]:
        assert {key: getattr(made, key) for key in flags} == flags and not made.use_zero1
    assert found.batch_size == 16


def test_the_config_stays_if_it_is_the_fastest(machine):
    machine.speed = lambda made: 1e6 if len(machine.trials) == 1 else 1e5
    machine.tune()
    assert "Best: the config as it is" in machine.printed.out


# --- the end ---


@pytest.mark.parametrize("most", [0, 1, 5])
def test_ctrl_c_says_the_best_so_far_and_writes_no_config(machine, most):
    """One run against one shows no gain."""
    machine.most = most
    machine.tune(status=INTERRUPTED)
    assert not machine.result.exists() and len(machine.trials) == most
    assert "Best: " in machine.printed.out and machine.printed.err.startswith("interrupted")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_budget_that_ends_before_the_repeats_writes_no_config(machine, count, monkeypatch):
    clock = itertools.count(0.0, 10.0)
    fake = SimpleNamespace(monotonic=lambda: next(clock), strftime=lambda form: "")
    monkeypatch.setattr(tune, "time", fake)
    machine.tune(f"--budget={10 * count}s", status=USER_ERROR)
    assert "the budget ends before the repeats" in machine.printed.err
    assert "Best: " in machine.printed.out and not machine.result.exists()
    assert len(machine.trials) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config/no_such.py"], "cannot read the config file config/no_such.py"),
        (["config/quickstart.py", "--write=LICENSE"], "was not written by tools.tune"),
        (["config/quickstart.py", "--budget=5"], "argument --budget: invalid seconds value: '5'"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert run_command(tune.main, arguments) == USER_ERROR
    assert message in capsys.readouterr().err


def test_a_gpu_that_others_use_is_refused_and_so_are_too_few(monkeypatch):
    memory, free = DeviceMemory(79.0, "GPU"), {0: 79.1 * trials.GIB, 1: 40 * trials.GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free[number], 80 * trials.GIB))
    monkeypatch.setattr(trials, "device_memory", lambda device, processes: memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert trials.look_at("cuda", 1) == memory == trials.look_at("cpu", 8)
    with pytest.raises(ValueError, match="GPU 1 is in use: 40.0 GiB"):
        trials.look_at("cuda", 2)
    free[1] = free[0]
    with pytest.raises(ValueError, match="needs as many GPUs, but torch sees 2"):
        trials.look_at("cuda", 3)


# --- real trials ---


def test_a_trial_is_a_run_of_bench_throughput_and_the_result_trains(tmp_path, run, capsys):
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "peak_tflops": 1.0}
    config = write_config(tmp_path / "tiny.py", **keys)
    flags = [f"--out_dir={tmp_path / 'out'}", f"--write={tmp_path / 'tuned.py'}", "--batch_size=4"]
    flags += ["--activation_checkpointing=none", "--iters=2", "--warmup=1"]
    assert run_command(tune.main, [str(config), *flags]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    assert "Best: the config as it is: " in printed and "tokens/s, MFU " in printed
    assert run_command(tune.main, [str(config), *flags]) == USER_ERROR, "its folder has trials"
    assert "choose another folder" in capsys.readouterr().err
    assert run(tmp_path / "tuned.py", f"--out_dir={tmp_path / 'run'}") == 0
    record = last_run(tmp_path / "run")["config"]
    assert record["tokens_per_iter"] == 128 and not record["compile"] and record["batch_size"] == 4
    assert record["learning_rate"] == TINY["learning_rate"], "what was not tuned is as in the config"


def test_what_bench_throughput_refuses_is_one_message(tmp_path):
    with pytest.raises(ValueError, match="bench.throughput: error: .*did you mean 'learning_rate'"):
        trials.run_trial(["--config=config/quickstart.py", "--learning_rat=1"], tmp_path / "trial")


def test_ctrl_c_stops_the_trial_with_sigterm(tmp_path, monkeypatch):
    script = tmp_path / "bench.sh"
    script.write_text("#!/bin/sh\ntrap 'echo stopped; exit' TERM\necho up\nwhile :; do sleep 0.1; done\n")
    os.chmod(script, 0o755)
    monkeypatch.setattr(trials, "sys", SimpleNamespace(executable=str(script)))
    whole, waits = subprocess.Popen.wait, iter([KeyboardInterrupt])

    def wait(process, *arguments, **keywords):
        if error := next(waits, None):
            while "up" not in (tmp_path / "trial.log").read_text():
                pass
            raise error
        return whole(process, *arguments, **keywords)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        trials.run_trial([], tmp_path / "trial")
    assert "stopped" in (tmp_path / "trial.log").read_text()


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
