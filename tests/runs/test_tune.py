"""tools.tune: the search with a speed for each setting in place of bench.throughput, one real trial, and what
it refuses."""

import itertools
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from support.helpers import SMALL, TINY, last_run, make_dataset, write_config

from bench import throughput
from common.command import INTERRUPTED, USER_ERROR, run_command
from tools import trials as trial
from tools import tune
from training.configuration.files_and_flags import load_config
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
        monkeypatch.setattr(trial, "run_to_end", self.run_to_end)
        memory = lambda *_: DeviceMemory(self.gib, "NVIDIA H200")  # noqa: E731
        monkeypatch.setattr(tune, "look_at", memory)

    def run_to_end(self, command, log):
        if len(self.trials) == self.most:
            raise KeyboardInterrupt
        options, flags = throughput.parse(command[3:])
        made = load_config([options.config, *flags], options.nproc)
        self.trials.append(made)
        self.commands.append(command)
        speed = self.speed(made)
        found = [speed * (1 + noise) for noise in self.noise(len(self.trials))]
        measured = {"tokens_per_sec": found, "mfu_percent": [50.0], "max_allocated_gb": 10.0}
        run = {"reason": None, "measurement": measured} if self.fits(made) else {"reason": OOM}
        (log.parent / "bench").mkdir()
        (log.parent / "bench" / "table.json").write_text(json.dumps({"entries": [{"runs": [run]}]}))

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
        assert made.gradient_accumulation_steps * made.batch_size * 2048 <= max(131_072, 2 * 65_536)
        assert made.checkpoint_interval == 0 and made.tokens_per_iter is None
    assert found.tokens_per_iter == 96 * 2048 and found.gradient_accumulation_steps == "auto"
    text = machine.result.read_text().replace("\n# ", " ")
    for word in (
        tune.MARK,
        "python -m tools.tune",
        "tokens/s",
        "MFU 50.00 %",
        "Measured 20",
        "3 runs",
        "H200",
    ):
        assert word in text, word
    assert "Best: " in machine.printed.out and "  kept" in machine.printed.out


def test_replays_are_timed_and_not_the_capture_of_a_graph(machine):
    machine.tune("--iters=8")
    for made, command in zip(machine.trials, machine.commands, strict=True):
        assert (f"--warmup={12 if made.use_cuda_graphs else 2}" in command) and "--iters=8" in command


def test_what_is_only_within_noise_is_left_out(machine):
    wave = (0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003)
    machine.speed, machine.noise = lambda made: 1000.0, lambda number: [wave[number % 7]] * 4
    machine.tune()
    assert "Best: the config as it is" in machine.printed.out


@pytest.mark.parametrize(("gain", "is_kept"), [(1.02, True), (1.006, True), (1.004, False)])
def test_a_step_counts_if_it_gains_more_than_equal_runs_differ_by(machine, gain, is_kept):
    machine.speed = lambda made: 1e6 * (gain if made.use_cuda_graphs else 1)
    assert machine.tune("--batch_size=4").use_cuda_graphs == is_kept
    graphed = [made for made in machine.trials if made.use_cuda_graphs]
    assert len(graphed) == (3 if is_kept else 1), "what is kept is repeated at the end"


def test_a_gain_by_which_the_rows_of_a_run_differ_too_is_none(machine):
    machine.speed = lambda made: 1e6 * (1.02 if made.use_cuda_graphs else 1)
    machine.noise = lambda number: (-0.04, -0.02, 0.0, 0.0, 0.02, 0.04)
    assert not machine.tune("--batch_size=4").use_cuda_graphs


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
    assert f"a repeat failed: {OOM}" in machine.printed.out


@pytest.mark.parametrize(
    ("gain", "installed", "flags", "is_kept"),
    [(1.03, True, (), True), (1.015, True, (), False), (1.03, False, (), False)]
    + [(1.03, True, ("--ffn_backend=torch",), False)],
)
def test_quack_is_tried_where_it_is_installed_and_kept_if_it_gains_two_percent(
    machine, monkeypatch, gain, installed, flags, is_kept
):
    def version(package):
        if not installed:
            raise metadata.PackageNotFoundError(package)
        return "0.6.5"

    monkeypatch.setattr(metadata, "version", version)
    machine.speed = lambda made: 1e6 * (gain if made.ffn_backend == "quack" else 1)
    assert (machine.tune("--batch_size=4", *flags).ffn_backend == "quack") == is_kept
    assert any(made.ffn_backend == "quack" for made in machine.trials) == (installed and not flags)


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


def test_nothing_is_started_that_does_not_fit_by_the_estimate(machine):
    machine.gib = 2.6
    machine.tune("--nproc=2")
    assert tune.NO_ROOM in machine.printed.out and max(made.batch_size for made in machine.trials) < 32
    machine.gib, count = 1.0, len(machine.trials)
    machine.folder /= "again"
    machine.tune("--nproc=2", status=USER_ERROR)
    assert "no setting of this config fits NVIDIA H200 with 1.0 GiB" in machine.printed.err
    assert len(machine.trials) == count


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


def test_without_a_trial_there_is_no_result(machine):
    machine.fits = lambda made: False
    machine.tune(status=USER_ERROR)
    assert f"the last one failed: {OOM}" in machine.printed.err and not machine.result.exists()


@pytest.mark.parametrize("most", [0, 1, 5])
def test_ctrl_c_says_the_best_so_far_and_writes_no_config(machine, most):
    """One run against one shows no gain."""
    machine.most = most
    machine.tune(status=INTERRUPTED)
    assert not machine.result.exists() and len(machine.trials) == most
    assert ("Best: " in machine.printed.out) == (most > 0)
    assert machine.printed.err.startswith("interrupted; no config was written" if most else "interrupted\n")


@pytest.mark.parametrize("trials", [1, 2, 7])
def test_a_budget_that_ends_before_the_repeats_writes_no_config(machine, trials, monkeypatch):
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    machine.tune(f"--budget={10 * trials}s", status=USER_ERROR)
    assert "no config was written: the repeats are missing" in machine.printed.err
    assert "Best: " in machine.printed.out and not machine.result.exists()
    assert len(machine.trials) == trials


@pytest.fixture
def config(tmp_path):
    keys = {**TINY, "dataset": make_dataset(tmp_path / "tokens"), "peak_tflops": 1.0}
    return write_config(tmp_path / "tiny.py", **keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config/no_such.py"], "cannot read the config file config/no_such.py"),
        (["config/full_qwen3_1.8b_optimal.py", "--nproc=8"], "needs as many GPUs, but torch sees 2"),
        (["config/quickstart.py", "--learning_rat=1"], "did you mean 'learning_rate'?"),
        (["config/quickstart.py", "--write=LICENSE"], "was not written by tools.tune"),
        (["config/quickstart.py", "--budget=5s"], "no time of 10s or more"),
        (["config/quickstart.py", "--out_dir=config"], "has files, maybe of trials that still run"),
        (
            ["config/quickstart.py", "--device=cpu", "--out_dir={}", "--dry_run=True"],
            "dry_run is the benchmark's",
        ),
    ],
)
def test_bad_input_is_one_clear_line(arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(trial.torch.cuda, "device_count", lambda: 2)
    arguments = [word.format(tmp_path / "out") for word in arguments]
    assert run_command(tune.main, arguments) == USER_ERROR
    assert message in capsys.readouterr().err


def test_a_gpu_that_others_use_is_refused(config, monkeypatch):
    memory = tune.look_at(load_config([str(config)]), 1)
    free = {0: 79.1 * trial.GIB, 1: 40 * trial.GIB}
    monkeypatch.setattr(trial.torch.cuda, "mem_get_info", lambda number: (free[number], 80 * trial.GIB))
    monkeypatch.setattr(trial, "device_memory", lambda device, processes: memory)
    monkeypatch.setattr(
        trial.concurrent.futures,
        "ProcessPoolExecutor",
        lambda count, context: ThreadPoolExecutor(count),
    )
    monkeypatch.setattr(trial.torch.cuda, "device_count", lambda: 2)
    on_gpu = load_config([str(config), "--device=cuda"])
    assert tune.look_at(on_gpu, 1) == memory
    with pytest.raises(ValueError, match="GPU 1 is in use: 40.0 GiB"):
        tune.look_at(on_gpu, 2)


# --- real trials ---


def test_a_trial_is_a_run_of_bench_throughput_and_the_result_trains(config, tmp_path, run, capsys):
    flags = [f"--out_dir={tmp_path / 'out'}", f"--write={tmp_path / 'tuned.py'}", "--batch_size=4"]
    flags += ["--activation_checkpointing=none", "--iters=2", "--warmup=1"]
    assert run_command(tune.main, [str(config), *flags]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    assert "Best: the config as it is: " in printed and "tokens/s, MFU " in printed
    assert run_command(tune.main, [str(config), *flags]) == USER_ERROR, "its folder has trials"
    assert run(tmp_path / "tuned.py", f"--out_dir={tmp_path / 'run'}") == 0
    record = last_run(tmp_path / "run")["config"]
    assert record["tokens_per_iter"] == 128 and not record["compile"] and record["batch_size"] == 4
    assert record["learning_rate"] == TINY["learning_rate"], "what was not tuned is as in the config"


def test_ctrl_c_stops_the_trial_with_sigterm(tmp_path, monkeypatch):
    code = "import signal, sys, time; signal.signal(15, lambda *_: (print('stopped'), sys.exit())); "
    code += "print('up', flush=True); time.sleep(60)"
    log, waits = tmp_path / "log", iter([KeyboardInterrupt])
    whole = subprocess.Popen.wait

    def wait(process, *arguments):
        if error := next(waits, None):
            while "up" not in log.read_text():
                pass
            raise error
        return whole(process, *arguments)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        trial.run_to_end([sys.executable, "-c", code], log)
    assert "stopped" in log.read_text()


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
